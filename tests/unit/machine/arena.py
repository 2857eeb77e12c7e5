"""What test_arena.py runs in a process of its own: a thread frees memory, which then goes back."""

from __future__ import annotations

import ctypes
import threading

from parallax.machine.host import data_bytes, trim_freed_memory, use_one_arena

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
    """Print the bytes that stay of 12 MiB."""
    use_one_arena()
    allocate_and_free(8 * MIB, 1)  # from now on malloc maps nothing smaller by itself
    before = data_bytes()
    thread = threading.Thread(target=allocate_and_free, args=(MIB // 2, 24))
    thread.start()
    thread.join()
    trim_freed_memory()
    print(data_bytes() - before)


if __name__ == "__main__":
    main()
