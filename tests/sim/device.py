"""The simulated accelerator ``sim`` as torch and the project see it. Importing this gives it to the whole process, so
only processes that end with a test do: torch has one accelerator, and ``auto`` takes it.

Device memory is host memory and kernels are the CPU's; what is simulated is order. Every access to device or pinned
memory is compared with every earlier one (by vector clocks, one for each stream), and copies between the two are
carried out as late as the order allows: an access without a wait is named as a race, and its bytes are wrong.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from parallax.machine.accelerator import Accelerator
from parallax.machine.accelerators import register_accelerator
from parallax.machine.pinned import Arena, RegisteredArena
from tests.sim.build import load

TOTAL_BYTES = 2**32

torch.utils.rename_privateuse1_backend("sim")
C: Any = load()


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device("sim", device.index or 0).index


def _module() -> types.ModuleType:
    """What torch.cuda is for CUDA."""
    module: Any = types.ModuleType("torch.sim")
    generators = tuple(C.default_generator(index) for index in range(C.device_count()))

    def seed(value: int) -> None:
        for generator in generators:
            generator.manual_seed(value)

    def limit(fraction: float, device: torch.device) -> None:
        C.cap(int(fraction * TOTAL_BYTES) if fraction < 1 else 0)

    facts = types.SimpleNamespace(name="a simulated device", total_memory=TOTAL_BYTES)
    initialized = False

    def properties(device: Any = 0) -> types.SimpleNamespace:
        """Asking for them initialises torch.cuda, too, though it takes no memory."""
        nonlocal initialized
        initialized = True
        return facts

    def is_initialized() -> bool:
        return initialized or torch.accelerator.max_memory_allocated(SIM) > 0

    module.device_count, module.current_device = C.device_count, C.current_device
    module.set_device = lambda device: C.set_device(_index(device))
    module.is_available = lambda: True
    module.is_initialized = is_initialized
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.manual_seed = module.manual_seed_all = seed
    module.default_generators = generators
    module.get_rng_state = lambda device=0: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=0: generators[_index(device)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    module.get_device_properties = properties
    module.get_device_name = lambda device=None: facts.name
    module.set_per_process_memory_fraction = limit
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    return module


torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)

_dlpack_device = torch.Tensor.__dlpack_device__


def _of_sim(self: torch.Tensor) -> Any:
    """torch 2.13 asks for "privateuse1" there, whatever the name is now."""
    if self.device.type == "sim":
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, self.device.index
    return _dlpack_device(self)


torch.Tensor.__dlpack_device__ = _of_sim  # type: ignore[method-assign]


class Sim(Accelerator):
    """Pinned as CUDA's memory is: whole pages that are registered."""

    def arena(self, device: torch.device, count: int, remedy: str) -> Arena:
        return RegisteredArena(
            count,
            lambda address, size: C.host_register(address, size) or 0,
            C.host_unregister,
            synchronize=lambda: torch.accelerator.synchronize(device),
            remedy=remedy,
        )


register_accelerator(Sim("sim"))
SIM = torch.device("sim", 0)
