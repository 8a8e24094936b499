"""CUDA C++ as TVM writes it, as C++ that the emulator's headers give a meaning to.

Most of CUDA C++ is left to macros and functions of those headers. What they cannot express is
rewritten here: dynamic shared memory, and for checked builds everything that touches memory.

========================================  =====================================================
source                                    checked build
========================================  =====================================================
``float* __restrict__ p`` (a parameter)   ``emu::Pointer<float> p``
``__shared__ float s[8];``                ``static emu::Shared<float, (8)> s("s");``
``extern __shared__ uchar d[];``          ``static const auto d = emu::dynamic_shared<uchar>();``
``(float4*)(p + 4)``                      ``emu::cast<float4>(p + 4)``
``float* q = p + 4;``                     ``auto q = p + 4;``
========================================  =====================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.cuda.launch import Parameter

__all__ = ["EmulatedKernel", "read_signatures", "translate"]

#: C type -> NumPy dtype.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "__half": "float16",
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "int8_t": "int8",
    "unsigned char": "uint8",
    "uchar": "uint8",
    "uint8_t": "uint8",
    "short": "int16",
    "int16_t": "int16",
    "unsigned short": "uint16",
    "ushort": "uint16",
    "uint16_t": "uint16",
    "int": "int32",
    "int32_t": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "uint": "uint32",
    "uint32_t": "uint32",
    "long": "int64",
    "long long": "int64",
    "int64_t": "int64",
    "unsigned long": "uint64",
    "unsigned long long": "uint64",
    "uint64_t": "uint64",
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
_BOUNDS = r"(?:__launch_bounds__\s*\((?P<{}>[^,)]*)(?:,[^)]*)?\)\s*)?"
_KERNEL = re.compile(
    rf"\b__global__\s+{_BOUNDS.format('before')}void\s+{_BOUNDS.format('after')}"
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)\s*(?P<end>[;{])"
)
_PARAMETER = re.compile(r"^(?P<type>[\w ]+?)\s*(?P<stars>\**)\s*(?P<name>\w+)$")
_WAITS = re.compile(r"\b(?:__syncthreads|__syncwarp|__shfl\w*|__ballot_sync|__any_sync|__all_sync)\b")

_WORD_TYPE = r"(?:const\s+)?(?:(?:unsigned|signed)\s+)?(?:long\s+long|\w+)"
_SHARED = re.compile(
    r"\b__shared__\s+(?:__align__\s*\(\w+\)\s*)?"
    rf"(?P<type>{_WORD_TYPE})\s+(?P<name>\w+)\s*(?P<sizes>(?:\[[^\]]+\]\s*)*);"
)
_DYNAMIC = re.compile(
    r"\bextern\s+__shared__\s+(?:__align__\s*\(\w+\)\s*)?"
    rf"(?P<type>{_WORD_TYPE})\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_POINTER_CAST = re.compile(rf"\(\s*(?P<type>{_WORD_TYPE})\s*\*\s*\)\s*(?=\()")
_NAME_CAST = re.compile(rf"\(\s*(?P<type>{_WORD_TYPE})\s*\*\s*\)\s*(?P<name>[A-Za-z_]\w*)")
_REINTERPRET = re.compile(rf"\breinterpret_cast<\s*(?P<type>{_WORD_TYPE})\s*\*\s*>\s*")
_LOCAL_POINTER = re.compile(
    rf"(?P<before>[{{;]\s*)(?:{_WORD_TYPE})\s*\*\s*(?:__restrict__\s+)?(?P<name>\w+)\s*=(?!=)"
)

#: What may stand in front of a parameter's type or name without a meaning here.
_QUALIFIERS = re.compile(r"\b(?:const|volatile)\b|\b__restrict__\b|\b__restrict\b")


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel that a source defines.

    Args:
        name: Its symbol.
        parameters: In order.
        launch_bounds: Most threads of a block, as C++; empty when it states none.
        shared: Size in bytes of its static shared memory, as C++.
        waits: Whether its threads wait for each other, at barriers or in warp operations.
    """

    name: str
    parameters: tuple[Parameter, ...]
    launch_bounds: str = field(repr=False)
    shared: str = field(repr=False)
    waits: bool


def read_signatures(source: str) -> dict[str, EmulatedKernel]:
    """The kernels that a source defines, by name, in its order.

    Raises:
        ToolFailed: A parameter has a type that the emulator does not know.
    """
    source = _strip_comments(source)
    heads = [match for match in _KERNEL.finditer(source) if match["end"] == "{"]
    ends = [match.start() for match in heads[1:]] + [len(source)]
    helpers = source[: heads[0].start()] if heads else ""
    helpers_wait = bool(_WAITS.search(_DIRECTIVE.sub("", helpers)))
    return {
        head["name"]: _read_kernel(head, source[head.end() : end], helpers_wait)
        for head, end in zip(heads, ends)
    }


def _read_kernel(head: re.Match[str], body: str, helpers_wait: bool) -> EmulatedKernel:
    sizes = [_size_of(match["type"], match["sizes"]) for match in _SHARED.finditer(body)]
    return EmulatedKernel(
        head["name"],
        tuple(_read_parameter(text, head["name"]) for text in _split(head["parameters"])),
        (head["before"] or head["after"] or "").split(",")[0],
        " + ".join(sizes) or "0",
        helpers_wait or bool(_WAITS.search(body)),
    )


def _split(parameters: str) -> list[str]:
    return [part for part in parameters.split(",") if part.strip() not in {"", "void"}]


def _read_parameter(text: str, kernel: str) -> Parameter:
    match = _PARAMETER.match(" ".join(_QUALIFIERS.sub(" ", text).split()))
    base = re.sub(r"[234]$", "", match["type"]) if match else ""
    dtype = _DTYPES.get(match["type"], _DTYPES.get(base)) if match else None
    if match is None or dtype is None or len(match["stars"]) > 1:
        raise ToolFailed(f"{kernel}: the emulator does not know the parameter {text.strip()!r}")
    if match["stars"]:
        return Parameter(match["name"], dtype)
    return Parameter(match["name"], dtype, np.dtype(dtype).itemsize, is_pointer=False)


def _size_of(element: str, sizes: str) -> str:
    return " * ".join([f"sizeof({element})", *(f"({size})" for size in re.findall(r"\[([^\]]+)\]", sizes))])


def translate(source: str, *, checked: bool) -> str:
    """Turns CUDA C++ into the C++ of one emulated library; line numbers stay as they are.

    Args:
        source: CUDA C++.
        checked: Whether every access to memory is to be looked at.

    Returns:
        C++ that includes the emulator's headers.
    """
    kernels = read_signatures(source)
    source = _strip_comments(source)
    if checked:
        source = _check_memory(source)
    else:
        source = _DYNAMIC.sub(r"static \g<type>* const \g<name> = emu::dynamic_shared<\g<type>>();", source)
    head = '#include "emulator/launch.h"\n#line 1 "kernels.cu"\n'
    return f"{head}{source}\n{_make_table(list(kernels.values()))}"


def _strip_comments(source: str) -> str:
    return _COMMENT.sub(lambda match: " " + "\n" * match[0].count("\n"), source)


def _check_memory(source: str) -> str:
    source = _KERNEL.sub(lambda match: _check_parameters(match[0], match["parameters"]), source)
    source = _DYNAMIC.sub(r"static const auto \g<name> = emu::dynamic_shared<\g<type>>();", source)
    source = _SHARED.sub(_check_shared, source)
    source = _LOCAL_POINTER.sub(r"\g<before>auto \g<name> =", source)
    source = _REINTERPRET.sub(r"emu::cast<\g<type>>", source)
    source = _POINTER_CAST.sub(r"emu::cast<\g<type>>", source)
    return _NAME_CAST.sub(r"emu::cast<\g<type>>(\g<name>)", source)


def _check_parameters(head: str, parameters: str) -> str:
    checked = [_check_parameter(text) for text in _split(parameters)]
    return head.replace(f"({parameters})", f"({', '.join(checked)})")


def _check_parameter(text: str) -> str:
    if "*" not in text:
        return text
    element, _, name = text.rpartition("*")
    return f"emu::Pointer<{element.strip()}> {_QUALIFIERS.sub('', name).strip()}"


def _check_shared(match: re.Match[str]) -> str:
    element, name = match["type"], match["name"]
    sizes = [f"({size})" for size in re.findall(r"\[([^\]]+)\]", match["sizes"])]
    if not sizes:
        storage = f'static emu::Shared<{element}, 1> {name}_storage("{name}");'
        return f"{storage} const auto {name} = *{name}_storage;"
    kind = "SharedTable" if len(sizes) == 2 else "Shared"
    return f'static emu::{kind}<{element}, {", ".join(sizes)}> {name}("{name}");'


def _make_table(kernels: list[EmulatedKernel]) -> str:
    """The kernels and what the launcher has to know of them."""
    names, rows = [], []
    for index, kernel in enumerate(kernels):
        quoted = "".join(f'"{parameter.name}", ' for parameter in kernel.parameters)
        names.append(f"static const char* const emu_names_{index}[] = {{{quoted}nullptr}};")
        bounds, waits = kernel.launch_bounds or "emu::kMaxThreads", str(kernel.waits).lower()
        values = f'"{kernel.name}", {bounds}, {kernel.shared}, {waits}, emu_names_{index}'
        rows.append(f"  emu::make_kernel<&{kernel.name}>({values}),")
    table = ["const emu::Kernel emu::kernels[] = {", *rows, "};"]
    return "\n".join([*names, *table, f"const int emu::kernel_count = {len(kernels)};", ""])
