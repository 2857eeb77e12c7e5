"""What test_arena.py runs in a process of its own: memory that is freed is used again, and a trim gives it back."""

from __future__ import annotations

import ctypes
import resource
import threading

from parallax.machine.host import data_bytes, keep_freed_memory, trim_freed_memory, use_one_arena

MIB = 2**20
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def allocate_and_free(size: int, count: int) -> None:
    """All of them are there at one time."""
    blocks = [_libc.malloc(size) for _ in range(count)]
    for block in blocks:
        _libc.memset(block, 1, size)
    for block in blocks:
        _libc.free(block)


def main() -> None:
    """Print the bytes that stay of 12 MiB that a thread has freed, and the page faults of 96 MiB that are allocated and
    freed for the third time."""
    use_one_arena()
    keep_freed_memory()
    allocate_and_free(MIB // 2, 192)
    allocate_and_free(MIB // 2, 192)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    allocate_and_free(MIB // 2, 192)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    trim_freed_memory()
    before = data_bytes()
    thread = threading.Thread(target=allocate_and_free, args=(MIB // 2, 24))
    thread.start()
    thread.join()
    trim_freed_memory()
    print(data_bytes() - before, faults)


if __name__ == "__main__":
    main()
