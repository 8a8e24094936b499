"""Which LLVM CPU name fits this machine, from the feature flags the kernel lists.

LLVM's own host detection knows only processors older than itself (LLVM 10 calls a 2021 server
"generic"), which costs the vector width. Features do not age: the most capable name whose
features are all present is right for code generation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GENERIC_CPU", "CpuFacts", "detect_cpu", "match_cpu", "read_cpu"]

_CPUINFO = Path("/proc/cpuinfo")
_CLOCK = re.compile(r"^cpu MHz\s*:\s*([\d.]+)", re.MULTILINE)
#: Flag -> float32 numbers in its vectors, the widest first.
_FLOAT_LANES = (("avx512f", 16), ("avx", 8))
_SSE_LANES = 4
_UNKNOWN_MHZ = 2000.0
#: Where the kernel tells the size of a core's own cache, and what it is taken for where it tells none.
_L2_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
_UNKNOWN_L2 = 1 << 20
_CORE = re.compile(r"^(?:physical id|core id)\s*:\s*(\d+)", re.MULTILINE)

#: What every x86-64 processor runs.
GENERIC_CPU = "x86-64"

_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm", "popcnt"})
_AVX512 = _AVX2 | {
    "avx512f",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512vl",
    "adx",
    "clflushopt",
    "clwb",
    "rdseed",
}
_ZEN = _AVX2 | {"adx", "clflushopt", "clzero", "rdseed", "sha_ni", "sse4a", "xsavec", "xsaves"}

#: LLVM CPU name -> flags of /proc/cpuinfo it relies on; the most capable first (LLVM 10, X86.td).
_CPUS: tuple[tuple[str, frozenset[str]], ...] = (
    ("cascadelake", _AVX512 | {"avx512_vnni"}),
    ("skylake-avx512", _AVX512),
    ("znver2", _ZEN | {"clwb", "rdpid", "wbnoinvd"}),
    ("znver1", _ZEN),
    ("haswell", _AVX2),
    ("sandybridge", frozenset({"avx", "popcnt", "sse4_2", "aes", "pclmulqdq"})),
    ("nehalem", frozenset({"sse4_2", "popcnt"})),
)


def match_cpu(flags: frozenset[str]) -> str:
    """The most capable LLVM CPU name whose features are all in ``flags``."""
    return next((name for name, needed in _CPUS if needed <= flags), GENERIC_CPU)


def detect_cpu(cpuinfo: Path = _CPUINFO) -> str:
    """The LLVM CPU name for this machine; ``x86-64`` when the flags cannot be read."""
    return match_cpu(_flags(_read(cpuinfo)))


@dataclass(frozen=True)
class CpuFacts:
    """What the kernel tells of a CPU.

    Args:
        name: Its LLVM name.
        cores: Cores that this process may use; two processors of one core count once.
        float_lanes: Float32 numbers in its widest vector.
        has_fma: Whether it multiplies and adds in one instruction.
        clock_hz: Its clock at the time of reading.
        l2_bytes: Second cache of a core.
    """

    name: str
    cores: int
    float_lanes: int
    has_fma: bool
    clock_hz: float
    l2_bytes: int = _UNKNOWN_L2


def read_cpu(cpuinfo: Path = _CPUINFO, usable: Collection[int] | None = None) -> CpuFacts:
    """What the kernel tells of this machine's CPU; where it tells nothing, one core with SSE at 2 GHz.

    Args:
        cpuinfo: The kernel's list of processors.
        usable: Their numbers that count; None: those that this process may use.
    """
    if usable is None and hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
    text = _read(cpuinfo)
    flags = _flags(text)
    lanes = next((lanes for flag, lanes in _FLOAT_LANES if flag in flags), _SSE_LANES)
    clocks = [float(mhz) for mhz in _CLOCK.findall(text)]
    return CpuFacts(
        name=match_cpu(flags),
        cores=_count_cores(text, usable),
        float_lanes=lanes,
        has_fma="fma" in flags,
        clock_hz=1e6 * (max(clocks) if clocks else _UNKNOWN_MHZ),
        l2_bytes=_read_size(_read(_L2_SIZE)),
    )


def _count_cores(text: str, usable: Collection[int] | None) -> int:
    """Cores among the usable processors; where the kernel names no cores, each processor is one."""
    cores = set()
    for processor in re.split(r"\n\s*\n", text):
        number = re.search(r"^processor\s*:\s*(\d+)", processor, re.MULTILINE)
        if number is not None and (usable is None or int(number[1]) in usable):
            cores.add(tuple(_CORE.findall(processor)) or number[1])
    return max(1, len(cores))


def _read_size(text: str) -> int:
    """Bytes of a size such as ``1024K``."""
    match = re.fullmatch(r"(\d+)([KM]?)\s*", text)
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]] if match else _UNKNOWN_L2


def _read(cpuinfo: Path) -> str:
    try:
        return cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _flags(text: str) -> frozenset[str]:
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
