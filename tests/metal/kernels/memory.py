"""Addresses of which only some have memory: touching any other is a crash."""

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Addresses:
    """A run of addresses without memory, in which parts are given some."""

    def __init__(self, bytes_: int) -> None:
        self.bytes = -(-bytes_ // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        found = _libc.mmap(None, self.bytes, PROT_NONE, flags, -1, 0)
        assert found not in (None, ctypes.c_void_p(-1).value), "no addresses"
        self.start = int(found)

    def give(self, offset: int, bytes_: int, fill: int = 0xFF) -> NDArray[np.uint8]:
        """Memory for whole pages at an offset, every byte of it ``fill``; 0xff makes NaN of all."""
        assert offset % PAGE == 0
        assert bytes_ % PAGE == 0
        assert offset + bytes_ <= self.bytes
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mprotect(self.start + offset, bytes_, protection) == 0
        memory = self.bytes_at(self.start + offset, bytes_)
        memory[:] = fill
        return memory

    @staticmethod
    def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
        """Memory as an array, in place."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))

    def __del__(self) -> None:
        _libc.munmap(self.start, self.bytes)


def exact_copy(array: NDArray[np.generic]) -> tuple[int, Addresses]:
    """The address of a copy behind whose last byte nothing lies, and what keeps it there."""
    bytes_ = -(-max(array.nbytes, 1) // PAGE) * PAGE
    addresses = Addresses(bytes_ + PAGE)
    memory = addresses.give(0, bytes_)
    memory[bytes_ - array.nbytes :] = np.frombuffer(array.tobytes(), np.uint8)
    return addresses.start + bytes_ - array.nbytes, addresses
