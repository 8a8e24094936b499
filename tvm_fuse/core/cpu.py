"""Which LLVM CPU name fits this machine, from the feature flags the kernel lists.

LLVM's own host detection knows only processors older than itself (LLVM 10 calls a 2021 server
"generic"), which costs the vector width. Features do not age: the most capable name whose
features are all present is right for code generation.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["GENERIC_CPU", "detect_cpu", "match_cpu"]

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


def detect_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The LLVM CPU name for this machine; ``x86-64`` when the flags cannot be read."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return GENERIC_CPU
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return match_cpu(frozenset(line.partition(":")[2].split()))
