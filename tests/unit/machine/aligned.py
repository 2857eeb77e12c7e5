"""What test_arena.py runs in a process of its own: aligned blocks of two sizes, as tensors are, in turn."""

from __future__ import annotations

import ctypes

TURNS = ((2**18, 32), (2**20, 8)) * 3  # bytes of a block, and blocks: 8 MiB each turn
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]


def main() -> None:
    """Print by how many bytes the heap grows after the first turn."""
    _libc.free(_libc.malloc(16 * 2**20))  # from now on, such blocks are in the heap
    blocks, ends = (ctypes.c_void_p * 32)(), []
    for size, count in TURNS:
        for place in range(count):
            there = ctypes.addressof(blocks) + place * ctypes.sizeof(ctypes.c_void_p)
            assert _libc.posix_memalign(there, 64, size) == 0  # as torch does
        for place in range(count):
            _libc.free(blocks[place])
        ends.append(_libc.sbrk(0))
    print(ends[-1] - ends[0])


if __name__ == "__main__":
    main()
