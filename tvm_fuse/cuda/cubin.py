"""A cubin read as what it is, an ELF file: what each kernel in it uses, without any CUDA tool.

NVIDIA documents the file's sections and no more; the numbers of attributes below are those of
``cuobjdump -elf`` (EIATTR_...). Registers, stack and parameters stand in ``.nv.info`` and
``.nv.info.KERNEL``, shared memory is the size of ``.nv.shared.KERNEL``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_fuse.core.errors import ToolFailed

__all__ = ["CubinKernel", "read_cubin"]

_CUDA_MACHINE = 190

#: Offsets of fields in an ELF64 header, and the size of a symbol.
_MACHINE, _SECTIONS, _FLAGS, _SECTION_SIZES, _ABI_VERSION, _SYMBOL_SIZE = 18, 40, 48, 58, 8, 24

#: Attributes in ``.nv.info``: (index of a symbol, value).
_FRAME_SIZE, _MIN_STACK_SIZE, _REGCOUNT = 0x11, 0x12, 0x2F
#: Attributes in ``.nv.info.KERNEL``.
_MAX_THREADS, _CBANK_PARAM_SIZE = 0x05, 0x19
#: Form of an attribute: 4 has a size and that many bytes, the others two bytes.
_SIZED = 0x04

#: From sm_90 on, the driver's share of each block is counted in ``.nv.shared.KERNEL``.
_RESERVED_SECTION, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024


@dataclass(frozen=True)
class CubinKernel:
    """What a cubin says about one kernel.

    Args:
        symbol: Its name.
        arch: Compute capability times ten that it is for, such as 90.
        registers_per_thread: Registers.
        frame_bytes: Stack of the kernel itself, for each thread.
        stack_bytes: Stack of a thread, with the functions that the kernel calls.
        smem_static_bytes: Shared memory of a block that the kernel declares.
        parameter_bytes: Size of all parameters.
        max_threads: Most threads of a block, from ``__launch_bounds__``; 0 when not stated.
    """

    symbol: str
    arch: int
    registers_per_thread: int
    frame_bytes: int
    stack_bytes: int
    smem_static_bytes: int
    parameter_bytes: int
    max_threads: int


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int


def read_cubin(cubin: bytes) -> dict[str, CubinKernel]:
    """Reads what the kernels of a cubin use.

    Args:
        cubin: The file.

    Returns:
        Symbol -> what it uses, for every kernel.

    Raises:
        ToolFailed: It is no cubin, or a damaged one.
    """
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, _MACHINE) != (_CUDA_MACHINE,):
        raise ToolFailed(f"the compiler's result is no cubin: it begins with {cubin[:8]!r}")
    try:
        sections = _read_sections(cubin)
        shared = _read_symbol_attributes(cubin, sections)
        arch = _read_arch(cubin)
        names = [name[len(".nv.info.") :] for name in sections if name.startswith(".nv.info.")]
        return {name: _read_kernel(cubin, name, arch, sections, shared) for name in names}
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise ToolFailed(f"the compiler's cubin cannot be read: {type(error).__name__}: {error}") from error


def _read_arch(cubin: bytes) -> int:
    """ABI 8 (sm_100 and newer, or CUDA 13) moved the number by one byte."""
    (flags,) = struct.unpack_from("<I", cubin, _FLAGS)
    return int(flags >> 8 & 0xFF if cubin[_ABI_VERSION] >= 8 else flags & 0xFF)


def _read_sections(cubin: bytes) -> dict[str, _Section]:
    (start,) = struct.unpack_from("<Q", cubin, _SECTIONS)
    size, count, names_index = struct.unpack_from("<HHH", cubin, _SECTION_SIZES)
    rows = [struct.unpack_from("<IIQQQQ", cubin, start + index * size) for index in range(count)]
    names_offset = rows[names_index][4]
    sections = (
        _Section(_read_text(cubin, names_offset + name), offset, length)
        for name, _, _, _, offset, length in rows
    )
    return {section.name: section for section in sections}


def _read_text(cubin: bytes, offset: int) -> str:
    return cubin[offset : cubin.index(b"\0", offset)].decode()


def _read_symbols(cubin: bytes, sections: dict[str, _Section]) -> list[str]:
    table, names = sections[".symtab"], sections[".strtab"]
    starts = range(table.offset, table.offset + table.size, _SYMBOL_SIZE)
    return [_read_text(cubin, names.offset + struct.unpack_from("<I", cubin, start)[0]) for start in starts]


def _read_symbol_attributes(cubin: bytes, sections: dict[str, _Section]) -> dict[tuple[str, int], int]:
    """(symbol, attribute) -> value, of ``.nv.info``."""
    symbols = _read_symbols(cubin, sections)
    values = {}
    for attribute, data in _read_attributes(cubin, sections[".nv.info"]):
        if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE, _REGCOUNT):
            symbol, value = struct.unpack("<II", data)
            values[symbols[symbol], attribute] = int(value)
    return values


def _read_attributes(cubin: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    place, end = section.offset, section.offset + section.size
    while place < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, place)
        place += 4
        if form != _SIZED:
            yield attribute, cubin[place - 2 : place]
            continue
        yield attribute, cubin[place : place + size]
        place += size


def _read_kernel(
    cubin: bytes, name: str, arch: int, sections: dict[str, _Section], shared: dict[tuple[str, int], int]
) -> CubinKernel:
    own = dict(_read_attributes(cubin, sections[f".nv.info.{name}"]))
    smem = sections.get(f".nv.shared.{name}")
    reserved_bytes = _RESERVED_BYTES if _RESERVED_SECTION in sections else 0
    frame_bytes = shared[name, _FRAME_SIZE]
    x, y, z = struct.unpack("<III", own[_MAX_THREADS]) if _MAX_THREADS in own else (0, 0, 0)
    return CubinKernel(
        symbol=name,
        arch=arch,
        registers_per_thread=shared[name, _REGCOUNT],
        frame_bytes=frame_bytes,
        stack_bytes=shared.get((name, _MIN_STACK_SIZE), frame_bytes),
        smem_static_bytes=smem.size - reserved_bytes if smem is not None else 0,
        parameter_bytes=struct.unpack("<H", own.get(_CBANK_PARAM_SIZE, b"\0\0"))[0],
        max_threads=x * y * z,
    )
