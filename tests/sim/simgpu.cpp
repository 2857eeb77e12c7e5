// A fake accelerator for tests ("sim", PrivateUse1): device memory is host memory, kernels are the CPU's and run when
// they are launched. Streams are vector clocks. Two things make missing waits visible on a CPU:
//   1. every access to device or pinned memory is checked against every earlier one that overlaps it (happens-before);
//      an allocation counts as a write by its stream, and a free as a use by it, as in a caching allocator;
//   2. copies between pinned and device memory that do not block are carried out as late as the order allows.
// Written from torch's public headers only. Limits: one host clock (races between host threads are not its business).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <list>
#include <map>
#include <set>
#include <mutex>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace py = pybind11;

namespace sim {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2, STREAMS = 16, ACTORS = 1 + DEVICES * STREAMS;  // actor 0 is the host
using VC = std::array<uint64_t, ACTORS>;

int actor(c10::Stream s) { return 1 + s.device_index() * STREAMS + (int)s.id(); }
void join(VC& a, const VC& b) { for (int i = 0; i < ACTORS; i++) a[i] = std::max(a[i], b[i]); }

struct Access { uintptr_t lo, hi; int who; uint64_t tick; bool write; std::string op; };
struct Block {
  size_t size; bool pinned; int device; int owner;  // owner: actor on whose stream it was allocated
  std::vector<Access> seen; std::set<int> recorded;
};
struct Task { uint64_t seq; int who; uint64_t tick; uintptr_t dst, src; size_t n; std::string op; };
struct Event { VC vc{}; uint64_t seq = 0; int queries = 0; double at = 0; };
struct Report { std::string what, stack; };

std::mutex mu;
std::map<uintptr_t, Block> blocks;
std::list<Task> tasks;
VC host{};
std::array<VC, ACTORS> clocks{};
std::array<uint64_t, ACTORS> ticks{};
uint64_t seq = 0;
std::array<int, DEVICES> made{};  // streams beside the default one
std::vector<Report> reports;
std::set<std::string> reported;
std::map<std::string, int64_t> counts;
// Virtual time, where it is on: kernels take what their operations or bytes take, whichever is longer, copies what the
// link takes; streams run beside each other and beside the host, which takes a moment for each launch.
struct Speeds { double flops = 0, memory = 0, up = 0, down = 0, launch = 0, least = 0; } speeds;
double host_at = 0;
std::array<double, ACTORS> stream_at{};
constexpr double POLL = 1e-6;  // of the host, for asking whether something is over
int lateness = 2;        // how often a query says "not yet"
bool late = true;        // carry copies out late
bool stacks = true, sync_stacks = false;
std::map<std::string, int64_t> sync_where;
size_t cap = 0;
int sync_micros = 0;     // how long event.synchronize takes at least
std::array<c10::CachingDeviceAllocator::DeviceStats, DEVICES> stats;
std::set<int> contexts;  // devices that a thread was on when it created an event or waited for one: a driver, which is
                         // not reported there whose event it is, makes a context on that device
thread_local int device_now = 0;
thread_local bool quiet = false;  // this thread's waits are ignored: it stands for the device's own machinery
thread_local std::array<int, DEVICES> stream_now{};
thread_local std::vector<size_t> fill;   // reports that want a Python stack
thread_local std::vector<std::string> fill_sync;

struct Scope {
  std::unique_lock<std::mutex> lock{mu};
  ~Scope() {
    lock.unlock();
    if ((fill.empty() && fill_sync.empty()) || !Py_IsInitialized()) { fill.clear(); fill_sync.clear(); return; }
    auto mine = std::move(fill); fill.clear();
    auto syncs = std::move(fill_sync); fill_sync.clear();
    std::string text;
    try {
      py::gil_scoped_acquire gil;
      py::list lines = py::module_::import("traceback").attr("format_stack")();
      size_t n = py::len(lines), from = n > 14 ? n - 14 : 0;
      for (size_t i = from; i < n; i++) text += py::cast<std::string>(lines[i]);
    } catch (...) { return; }
    std::lock_guard<std::mutex> again(mu);
    for (auto i : mine) if (i < reports.size()) reports[i].stack = text;
    for (auto& s : syncs) sync_where[s + "\n" + text]++;
  }
};

std::string name(int who) {
  if (who == 0) return "the host";
  int d = (who - 1) / STREAMS, s = (who - 1) % STREAMS;
  return "stream " + std::to_string(s) + (d ? " of device " + std::to_string(d) : "");
}

void report(const std::string& what) {
  if (!reported.insert(what).second) { counts["repeated"]++; return; }
  reports.push_back({what, ""});
  if (stacks) fill.push_back(reports.size() - 1);
}

void synced(const char* why) { if (quiet) return; counts[why]++; if (sync_stacks) fill_sync.push_back(why); }

std::map<uintptr_t, Block>::iterator find(uintptr_t p) {
  auto it = blocks.upper_bound(p);
  if (it == blocks.begin()) return blocks.end();
  --it;
  return p < it->first + std::max<size_t>(1, it->second.size) ? it : blocks.end();
}

void touch(uintptr_t p, size_t n, int who, bool write, const std::string& op) {
  if (!n) return;
  auto it = find(p);
  if (it == blocks.end()) return;
  auto& seen = it->second.seen;
  auto lo = p, hi = p + n;
  const VC& now = clocks[who];
  std::vector<Access> keep;
  for (auto& a : seen) {
    bool overlaps = a.lo < hi && lo < a.hi, ordered = a.who == who || now[a.who] >= a.tick;
    if (overlaps && (a.write || write) && !ordered)
      report(op + " on " + name(who) + (write ? " writes" : " reads") + (it->second.pinned ? " pinned" : "") +
             " memory that " + a.op + " on " + name(a.who) + (a.write ? " wrote" : " read") + ": no wait between them");
    bool covered = lo <= a.lo && a.hi <= hi;
    if (ordered && covered && (write || (!a.write && a.who == who))) continue;
    keep.push_back(std::move(a));
  }
  keep.push_back({lo, hi, who, ticks[who], write, op});
  seen = std::move(keep);
}

// The host is about to write what a copy may still read.
void host_writes(uintptr_t p, size_t n) {
  auto it = find(p);
  if (it == blocks.end()) return;
  for (auto& a : it->second.seen)
    if (a.lo < p + n && p < a.hi && host[a.who] < a.tick)
      report("the host writes pinned memory that " + a.op + " on " + name(a.who) + (a.write ? " writes" : " reads") +
             ": it has not waited for that");
}

void carry_out(const Task& t) { std::memcpy((void*)t.dst, (void*)t.src, t.n); }

void flush(const VC& upto) {
  for (auto it = tasks.begin(); it != tasks.end();)
    if (it->tick <= upto[it->who]) { carry_out(*it); it = tasks.erase(it); } else ++it;
}

bool timed() { return speeds.flops > 0; }

void busy(int who, double seconds) { if (timed()) stream_at[who] += std::max(seconds, speeds.least); }

void launch(int who) {
  host_at += speeds.launch;
  stream_at[who] = std::max(stream_at[who], host_at);
  join(clocks[who], host);
  clocks[who][who] = ++ticks[who];
  ++seq;
  flush(clocks[who]);
}

void host_waits(const VC& vc, double until) { join(host, vc); host_at = std::max(host_at, until); flush(host); }

void host_waits(int who) { host_waits(clocks[who], stream_at[who]); }

int current(int device) { return 1 + device * STREAMS + stream_now[device]; }

// ------------------------------------------------------------------------------------------------ memory

void bump(c10::CachingAllocator::StatArray& a, int64_t by) {
  auto& s = a[0];
  if (by >= 0) s.increase(by); else s.decrease(-by);
}

void free_device(void* p) {
  Scope scope;
  auto it = blocks.find((uintptr_t)p);
  if (it == blocks.end()) return;
  auto& b = it->second;
  VC next = clocks[b.owner];  // of the first thing that may use these bytes again
  join(next, host);
  for (auto& a : b.seen)
    if (a.who != b.owner && next[a.who] < a.tick && !b.recorded.count(a.who))
      report("memory of " + name(b.owner) + " is freed while " + a.op + " on " + name(a.who) +
             " may still " + (a.write ? "write" : "read") + " it: neither a wait nor record_stream");
  for (auto t = tasks.begin(); t != tasks.end();) {
    bool hits = (t->dst < it->first + b.size && it->first < t->dst + t->n) ||
                (t->src < it->first + b.size && it->first < t->src + t->n);
    if (hits) { carry_out(*t); t = tasks.erase(t); } else ++t;
  }
  bump(stats[b.device].allocated_bytes, -(int64_t)b.size);
  bump(stats[b.device].reserved_bytes, -(int64_t)b.size);
  std::memset(p, 0xA5, b.size);
  blocks.erase(it);
  std::free(p);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(KIND, (c10::DeviceIndex)device_now);
    if (!n) return {nullptr, nullptr, &free_device, device};
    size_t size = (n + 511) / 512 * 512;
    Scope scope;
    auto& s = stats[device_now];
    if (cap && s.allocated_bytes[0].current + size > cap) {
      s.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: ", size, " bytes more than ",
                       s.allocated_bytes[0].current, " of ", cap);
    }
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 4096, size) == 0, "no host memory");
    std::memset(p, 0xA5, size);
    int who = current(device_now);
    // As if the block had been in use by the last kernel of its stream until now.
    join(clocks[who], host);
    clocks[who][who] = ++ticks[who];
    Block b{size, false, device_now, who, {}, {}};
    b.seen.push_back({(uintptr_t)p, (uintptr_t)p + size, who, ticks[who], true, "the block's last user"});
    blocks.emplace((uintptr_t)p, std::move(b));
    bump(s.allocated_bytes, size); bump(s.reserved_bytes, size);
    s.num_device_alloc++;
    return {p, p, &free_device, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* d, const void* s, size_t n) const override { std::memcpy(d, s, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    Scope scope;
    auto it = find((uintptr_t)p.get());
    if (it != blocks.end()) it->second.recorded.insert(actor(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override { Scope s; return stats[d]; }
  void resetAccumulatedStats(c10::DeviceIndex d) override { Scope s; stats[d].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex d) override {
    Scope s; stats[d].allocated_bytes[0].reset_peak(); stats[d].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    Scope s; size_t total = cap ? cap : (size_t)1 << 32;
    return {total - std::min<size_t>(total, stats[d].allocated_bytes[0].current), total};
  }
};
DeviceAllocator device_allocator;

void pin(uintptr_t p, size_t n) { Scope s; blocks.emplace(p, Block{n, true, -1, 0, {}, {}}); }

void unpin(uintptr_t p, bool guarded) {
  Scope s;
  auto it = blocks.find(p);
  if (it == blocks.end()) return;
  for (auto t = tasks.begin(); t != tasks.end();) {
    bool hits = (t->dst >= p && t->dst < p + it->second.size) || (t->src >= p && t->src < p + it->second.size);
    if (hits && !guarded) report("pinned memory is unregistered while " + t->op + " on " + name(t->who) + " uses it");
    if (hits) { carry_out(*t); t = tasks.erase(t); } else ++t;
  }
  blocks.erase(it);
}

void free_host(void* p) { unpin((uintptr_t)p, true); std::free(p); }  // torch's own waits for events

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &free_host, c10::Device(c10::kCPU)};
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 4096, n) == 0, "no host memory");
    pin((uintptr_t)p, n);
    { Scope s; counts["pinned allocations"]++; }
    return {p, p, &free_host, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* d, const void* s, size_t n) const override { std::memcpy(d, s, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator host_allocator;

bool is_pinned(const void* p) {
  Scope s;
  auto it = find((uintptr_t)p);
  return it != blocks.end() && it->second.pinned;
}

// ------------------------------------------------------------------------------------- streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device at_(int i) const { return {KIND, (c10::DeviceIndex)i}; }
  c10::Device exchangeDevice(c10::Device d) const override { int old = device_now; setDevice(d); return at_(old); }
  c10::Device getDevice() const override { return at_(device_now); }
  void setDevice(c10::Device d) const override { if (d.has_index()) device_now = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.has_index()) device_now = d.index(); }
  int index(c10::Device d) const { return d.has_index() ? d.index() : device_now; }
  c10::Stream of(int d, int s) const { return c10::Stream(c10::Stream::UNSAFE, at_(d), s); }
  c10::Stream getStream(c10::Device d) const override { return of(index(d), stream_now[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return of(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    Scope s; int i = index(d); made[i] = made[i] % (STREAMS - 1) + 1; return of(i, made[i]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = of(s.device_index(), stream_now[s.device_index()]);
    stream_now[s.device_index()] = (int)s.id();
    return old;
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Scope scope;
    if (!*e) *e = new Event;
    int who = actor(s);
    join(clocks[who], host);
    clocks[who][who] = ++ticks[who];
    stream_at[who] = std::max(stream_at[who], host_at);
    *(Event*)*e = Event{clocks[who], ++seq, 0, stream_at[who]};
  }
  void block(void* e, const c10::Stream& s) const override {
    if (!e) return;
    Scope scope;
    join(clocks[actor(s)], ((Event*)e)->vc);
    stream_at[actor(s)] = std::max({stream_at[actor(s)], host_at, ((Event*)e)->at});
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    Scope scope;
    contexts.insert(device_now);
    auto& event = *(Event*)e;
    bool known = true;
    for (int i = 0; i < ACTORS; i++) known = known && event.vc[i] <= host[i];
    if (timed()) {
      host_at += POLL;
      if (event.at > host_at) return false;
    } else if (!known && event.queries++ < lateness) return false;
    host_waits(event.vc, event.at);
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& s) const override { Scope scope; host_waits(actor(s)); return true; }
  void synchronizeStream(const c10::Stream& s) const override {
    Scope scope; synced("stream.synchronize"); host_waits(actor(s));
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    if (sync_micros) usleep(sync_micros);
    Scope scope; contexts.insert(device_now); synced("event.synchronize"); host_waits(((Event*)e)->vc, ((Event*)e)->at);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    Scope scope; synced("device.synchronize");
    for (int s = 0; s < STREAMS; s++) host_waits(1 + d * STREAMS + s);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    device_allocator.recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    Scope scope;
    auto& one = *(Event*)a; auto& other = *(Event*)b;
    return timed() ? 1e3 * (other.at - one.at) : 1e-3 * (double)(other.seq - one.seq);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------------------------------------- generator

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex i) {
    device_ = c10::Device(KIND, std::max<c10::DeviceIndex>(i, 0));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex d) const override { device_now = d; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto o = device_now; device_now = d; return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {KIND, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override {
    static std::array<at::Generator, DEVICES> found{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return found[i < 0 ? device_now : i];
  }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? device_now : i);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = device_allocator.allocate(n);
    size_t both = std::min<size_t>(n, storage.nbytes());
    if (both && impl->data()) {
      Scope s; int who = current(device_now); launch(who);
      touch((uintptr_t)impl->data(), both, who, false, "resize"); touch((uintptr_t)data.get(), both, who, true, "resize");
      std::memcpy(data.get(), impl->data(), both);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(n);
  }
};

// ---------------------------------------------------------------------------------------------- operators

bool mine(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }

size_t extent(const at::Tensor& t) {
  if (!t.numel()) return 0;
  int64_t n = 1;
  for (int64_t i = 0; i < t.dim(); i++) n += (t.size(i) - 1) * t.stride(i);
  return n * t.element_size();
}

at::Tensor lowered(const at::Tensor& t) {
  TORCH_CHECK(t.data_ptr() || !t.numel(), "a kernel was given a tensor without memory");
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU).requires_grad(false));
}

void note(const at::Tensor& t, int who, bool write, const std::string& op) {
  touch((uintptr_t)t.data_ptr(), extent(t), who, write, op);
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                               std::optional<c10::Device> device, std::optional<bool>,
                               std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_all(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, source, offset, size, stride);
}

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const_cast<at::Tensor&>(to).copy_(from);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  bool up = !mine(self), down = !mine(dst);
  const c10::DeviceGuard guard(up ? dst.device() : self.device());
  at::Tensor from = up ? self : lowered(self), to = down ? dst : lowered(dst);
  if (!dst.numel()) return dst;
  bool plain = self.dtype() == dst.dtype() && self.is_contiguous() && dst.is_contiguous() &&
               self.numel() == dst.numel() && !self.is_conj() && !dst.is_conj() && !self.is_neg() && !dst.is_neg();
  std::string op = up ? "a copy up" : down ? "a copy down" : "a copy";
  int who = current(device_now);
  bool deferred = false;
  if (up || down) {
    const auto& hosted = up ? self : dst;
    bool pinned = is_pinned(hosted.data_ptr());
    bool blocks_host = !non_blocking || (!pinned && down);
    Scope s;
    launch(who);
    note(self, who, false, op);
    note(dst, who, true, op);
    busy(who, (double)dst.nbytes() / (up ? speeds.up : speeds.down));
    if (!pinned) counts[up ? "pageable copies up" : "pageable copies down"]++;
    deferred = !blocks_host && pinned && plain && late;  // no tensor is copied under the lock: that may take the GIL
    if (deferred)
      tasks.push_back({seq, who, ticks[who], (uintptr_t)dst.data_ptr(), (uintptr_t)self.data_ptr(),
                       (size_t)dst.nbytes(), op});
    if (blocks_host) { synced(up ? "blocking copy up" : "blocking copy down"); host_waits(who); }
  } else {
    Scope s;
    launch(who);
    note(self, who, false, op);
    note(dst, who, true, op);
    busy(who, 2.0 * (double)dst.nbytes() / speeds.memory);
  }
  if (!deferred) copy_now(from, to);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}

at::Scalar item(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  { Scope s; int who = current(device_now); launch(who); note(self, who, false, "item"); synced("item");
    busy(who, 0); host_waits(who); }
  return at::native::_local_scalar_dense_cpu(lowered(self));
}

at::Tensor raise(const at::Tensor& t, c10::Device device) {  // what a kernel made, on the device
  const c10::DeviceGuard guard(device);
  at::Tensor found = at::detail::empty_strided_generic(t.sizes(), t.strides(), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.scalar_type());
  if (t.numel()) std::memcpy(found.data_ptr(), t.data_ptr(), extent(t));
  return found;
}

// Multiplications and additions of what multiplies matrices; of everything else bytes decide.
double operations(const std::string& name, const torch::jit::Stack& given, const torch::jit::Stack& made) {
  static const std::map<std::string, size_t> left{{"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}};
  auto found = left.find(name);
  if (found == left.end() || made.empty() || !made[0].isTensor()) return 0;
  return 2.0 * (double)made[0].toTensor().numel() * (double)given[found->second].toTensor().size(-1);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  const size_t n = formal.size(), begin = stack->size() - n;
  std::vector<c10::IValue> args(stack->begin() + begin, stack->end());
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, bool>> used;
  struct Fresh { at::Tensor out, made; };
  std::vector<Fresh> fresh;
  std::optional<at::Generator> generator, stand_in;
  auto lower = [&](const at::Tensor& t, bool write) -> at::Tensor {
    if (!mine(t)) return t;
    if (!device) device = t.device();
    used.emplace_back(t, write);
    if (write && !t.numel()) {
      fresh.push_back({t, at::empty({0}, t.options().device(c10::kCPU))});
      return fresh.back().made;
    }
    return lowered(t);
  };
  torch::jit::Stack cpu;
  for (size_t i = 0; i < n; i++) {
    const auto& v = args[i];
    bool write = formal[i].alias_info() && formal[i].alias_info()->isWrite();
    if (v.isTensor()) cpu.emplace_back(lower(v.toTensor(), write));
    else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(lower(t, write));
      cpu.emplace_back(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : v.toOptionalTensorList())
        list.push_back(t.has_value() ? std::optional<at::Tensor>(lower(*t, write)) : std::nullopt);
      cpu.emplace_back(list);
    } else if (v.isDevice() && v.toDevice().type() == KIND) { device = v.toDevice(); cpu.emplace_back(c10::Device(c10::kCPU)); }
    else if (v.isGenerator() && v.toGenerator().device().type() == KIND) {
      generator = v.toGenerator();
      auto* of = static_cast<at::CPUGeneratorImpl*>(generator->unsafeGetGeneratorImpl());
      stand_in = at::make_generator<at::CPUGeneratorImpl>();
      static_cast<at::CPUGeneratorImpl*>(stand_in->unsafeGetGeneratorImpl())->set_engine(of->engine());
      cpu.emplace_back(*stand_in);
    } else cpu.emplace_back(v);
  }
  if (!device) device = c10::Device(KIND, (c10::DeviceIndex)device_now);
  const c10::DeviceGuard guard(*device);
  {
    Scope s;
    int who = current(device_now);
    launch(who);
    for (auto& [t, write] : used) { note(t, who, false, schema.name()); if (write) note(t, who, true, schema.name()); }
    counts["kernels"]++;
  }
  const torch::jit::Stack lowered_args = timed() ? cpu : torch::jit::Stack();
  op.callBoxed(&cpu);
  if (timed()) {
    double bytes = 0;
    for (auto& [t, write] : used) bytes += (double)extent(t) * (write ? 2 : 1);
    for (auto& v : cpu) if (v.isTensor() && v.toTensor().defined()) bytes += (double)v.toTensor().nbytes();
    Scope s;
    busy(current(device_now), std::max(bytes / speeds.memory, operations(schema.name(), lowered_args, cpu) / speeds.flops));
  }
  if (generator) {
    static_cast<at::CPUGeneratorImpl*>(generator->unsafeGetGeneratorImpl())
        ->set_engine(static_cast<at::CPUGeneratorImpl*>(stand_in->unsafeGetGeneratorImpl())->engine());
  }
  for (auto& f : fresh)
    if (f.made.numel()) {
      at::native::resize_(f.out, f.made.sizes(), std::nullopt);
      f.out.unsafeGetTensorImpl()->set_sizes_and_strides(f.made.sizes(), f.made.strides());
      std::memcpy(f.out.data_ptr(), f.made.data_ptr(), extent(f.made));
    }
  torch::jit::drop(*stack, n);
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto* info = schema.returns()[i].alias_info();
    if (info) {
      TORCH_CHECK(info->isWrite(), schema.name(), " returns a view: not on this device");
      bool found = false;
      for (size_t j = 0; j < n && !found; j++)
        if (formal[j].alias_info() && *formal[j].alias_info() == *info) { stack->push_back(args[j]); found = true; }
      TORCH_CHECK(found, schema.name(), ": an output that is no input");
      continue;
    }
    auto& v = cpu[i];
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().device().is_cpu())
      stack->emplace_back(raise(v.toTensor(), *device));
    else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(raise(t, *device));
      stack->emplace_back(list);
    } else stack->push_back(v);
  }
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef pad, c10::SymIntArrayRef dil, bool tr, c10::SymIntArrayRef opad,
    c10::SymInt groups) {
  { Scope s; int who = current(device_now); launch(who);
    note(x, who, false, "convolution"); note(w, who, false, "convolution");
    if (b && b->defined()) note(*b, who, false, "convolution"); }
  std::optional<at::Tensor> bias = b && b->defined() ? std::optional<at::Tensor>(lowered(*b)) : std::nullopt;
  return raise(at::convolution_symint(lowered(x), lowered(w), bias, stride, pad, dil, tr, opad, groups), x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& g, const at::Tensor& x,
    const at::Tensor& w, c10::SymIntArrayRef stride, c10::SymIntArrayRef pad, c10::SymIntArrayRef dil, bool tr,
    c10::SymIntArrayRef opad, c10::SymInt groups, std::array<bool, 3> mask) {
  { Scope s; int who = current(device_now); launch(who);
    for (const at::Tensor* t : {&g, &x, &w}) note(*t, who, false, "convolution_backward"); }
  std::vector<c10::SymInt> sizes{w.sym_size(tr ? 1 : 0)};
  auto [a, b, c] = at::convolution_backward_symint(lowered(g), lowered(x), lowered(w), c10::SymIntArrayRef(sizes), stride, pad,
                                                   dil, tr, opad, groups, mask);
  auto up = [&](const at::Tensor& t) { return t.defined() ? raise(t, x.device()) : t; };
  return {up(a), up(b), up(c)};
}

// DDP's reducer asks for one of its device; it is used for statistics alone.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  void record(Event event) override { getTimeRef(event) = 1; }
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};

bool registered = [] {
  c10::SetAllocator(KIND, &device_allocator);
  at::setHostAllocator(KIND, &host_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace sim

namespace c10d { C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, sim::NoTimer); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty_memory_format);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("resize_", sim::resize_);
  m.impl("set_.source_Storage", sim::set_source);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_.source_Storage_storage_offset", sim::set_all);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::item);
  m.impl("convolution_overrideable", sim::convolution);
  m.impl("convolution_backward_overrideable", sim::convolution_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  auto nogil = py::call_guard<py::gil_scoped_release>();
  m.def("reports", [] { std::vector<std::pair<std::string, std::string>> f; Scope s; for (auto& r : reports) f.emplace_back(r.what, r.stack); return f; }, nogil);
  m.def("counts", [] { Scope s; return counts; }, nogil);
  m.def("sync_where", [] { Scope s; return sync_where; }, nogil);
  m.def("pending", [] { Scope s; return tasks.size(); }, nogil);
  m.def("pinned_bytes", [] { Scope s; size_t n = 0; for (auto& [p, b] : blocks) if (b.pinned) n += b.size; return n; }, nogil);
  m.def("reset", [] { Scope s; reports.clear(); reported.clear(); counts.clear(); sync_where.clear(); contexts.clear(); }, nogil);
  m.def("contexts", [] { Scope s; return contexts; }, nogil);
  m.def("host_writes", [](uintptr_t p, size_t n) { Scope s; sim::host_writes(p, n); }, nogil);
  m.def("configure", [](int l, bool late_, bool st, bool ss, size_t c) { Scope s; lateness = l; late = late_; stacks = st; sync_stacks = ss; cap = c; },
        py::arg("lateness") = 2, py::arg("late") = true, py::arg("stacks") = true, py::arg("sync_stacks") = false, py::arg("cap") = 0, nogil);
  m.def("quiet", [](bool q) { quiet = q; });
  m.def("speeds", [](double flops, double memory, double up, double down, double launch, double least) {
    Scope s; speeds = {flops, memory, up, down, launch, least}; host_at = 0; stream_at.fill(0); },
    py::arg("flops") = 0, py::arg("memory") = 0, py::arg("up") = 0, py::arg("down") = 0, py::arg("launch") = 0, py::arg("least") = 0, nogil);
  m.def("host_seconds", [] { Scope s; return host_at; }, nogil);
  m.def("forget_waits", [] { Scope s; sync_where.clear(); }, nogil);
  m.def("cap", [](size_t c) { Scope s; cap = c; }, nogil);
  m.def("sync_micros", [](int n) { sync_micros = n; });
  m.def("host_register", [](uintptr_t p, size_t n) { pin(p, n); }, nogil);
  m.def("host_unregister", [](uintptr_t p) { unpin(p, false); }, nogil);
  m.def("device_count", [] { return DEVICES; });
  m.def("current_device", [] { return device_now; });
  m.def("set_device", [](int d) { device_now = d; });
  m.def("default_generator", [](int d) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(d); });
}
