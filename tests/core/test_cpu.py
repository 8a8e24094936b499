"""The LLVM CPU name from the flags of /proc/cpuinfo."""

from __future__ import annotations

import pytest

from tvm_fuse.core.cpu import (
    _CPUS,
    GENERIC_CPU,
    CpuFacts,
    _read_size,
    detect_cpu,
    match_cpu,
    read_cpu,
)

NEEDED = dict(_CPUS)


@pytest.mark.parametrize("name", NEEDED)
def test_each_name_from_exactly_its_flags(name):
    assert match_cpu(NEEDED[name] | {"fpu", "sse2"}) == name


@pytest.mark.parametrize("name", NEEDED)
def test_each_flag_is_needed(name):
    for flag in NEEDED[name]:
        assert match_cpu(NEEDED[name] - {flag}) != name


def test_most_capable_first():
    names = list(NEEDED)
    for place, name in enumerate(names):
        assert not any(NEEDED[earlier] <= NEEDED[name] for earlier in names[:place])


@pytest.mark.parametrize("flags", [(), ("avx2",), ("avx512f", "avx2", "fma")], ids=" ".join)
def test_generic(flags):
    assert match_cpu(frozenset(flags)) == GENERIC_CPU


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nflags\t\t: " + " ".join(sorted(NEEDED["haswell"])) + "\nbugs\t: x\n", "haswell"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", GENERIC_CPU),
        ("flags", GENERIC_CPU),
        ("", GENERIC_CPU),
    ],
    ids=["x86", "arm", "cut", "empty"],
)
def test_detect(tmp_path, text, name):
    path = tmp_path / "cpuinfo"
    path.write_text(text, encoding="utf-8")
    assert detect_cpu(path) == name


def test_detect_without_the_file(tmp_path):
    assert detect_cpu(tmp_path / "none") == GENERIC_CPU


def test_detect_of_damaged_text(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_bytes(b"model name\t: \xff\xfe\nflags\t: sse4_2 popcnt\n")
    assert detect_cpu(path) == "nehalem"


def test_this_machine():
    assert detect_cpu() in {*NEEDED, GENERIC_CPU}


CPUINFO = """processor\t: 0
cpu MHz\t\t: 2500.000
flags\t\t: {flags}

processor\t: 1
cpu MHz\t\t: 3100.5
flags\t\t: {flags}
"""


@pytest.mark.parametrize(
    ("flags", "lanes", "has_fma"),
    [
        ("fpu sse2", 4, False),
        ("sse2 avx", 8, False),
        ("avx avx2 fma", 8, True),
        ("avx avx512f fma", 16, True),
    ],
)
def test_facts(tmp_path, flags, lanes, has_fma):
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(flags=flags))
    facts = read_cpu(tmp_path / "cpuinfo", range(2))
    assert (facts.cores, facts.float_lanes, facts.has_fma) == (2, lanes, has_fma)
    assert facts.clock_hz == 3100.5e6


def test_facts_of_nothing(tmp_path):
    nothing = read_cpu(tmp_path / "none")
    assert nothing == CpuFacts(GENERIC_CPU, 1, 4, False, 2e9, nothing.l2_bytes)


TWO_THREADS_A_CORE = "\n".join(
    f"processor\t: {number}\nphysical id\t: {number // 4}\ncore id\t\t: {number % 2}\n" for number in range(8)
)


@pytest.mark.parametrize(("usable", "cores"), [(range(8), 4), ((0, 2), 1), ((0, 1), 2), ((), 1)], ids=str)
def test_processors_of_one_core_count_once(tmp_path, usable, cores):
    (tmp_path / "cpuinfo").write_text(TWO_THREADS_A_CORE)
    assert read_cpu(tmp_path / "cpuinfo", usable).cores == cores


@pytest.mark.parametrize(
    ("text", "size"), [("1024K\n", 1 << 20), ("2M", 2 << 20), ("512", 512), ("", 1 << 20), ("much", 1 << 20)]
)
def test_sizes_of_caches(text, size):
    assert _read_size(text) == size
