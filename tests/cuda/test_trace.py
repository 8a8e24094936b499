"""Traces as files: where tensors are looked at, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.bundles import KERNEL_FILES, W, X, bundle, expected
from tvm_fuse.core.errors import ModelError
from tvm_fuse.cuda.bundle_files import save_bundle
from tvm_fuse.cuda.trace import SAMPLES, TRACE_FILE, Probe, load_trace, pack_trace, sample_positions


@pytest.mark.parametrize("size", [0, 1, SAMPLES, SAMPLES + 1, 100_000, 2**33])
def test_positions(size):
    positions = sample_positions(size)
    assert len(positions) == min(size, SAMPLES)
    assert np.array_equal(positions, sample_positions(size))
    assert (np.diff(positions) >= 0).all()
    if size:
        assert (positions[0], positions[-1]) == (0, size - 1)


def test_positions_of_a_large_tensor_are_all_over_it():
    assert np.histogram(sample_positions(1_000_000), 10, (0, 1_000_000))[0].min() > SAMPLES / 20


def save(folder, probes):
    files = {**KERNEL_FILES, TRACE_FILE: pack_trace(probes)}
    return save_bundle(folder, bundle(), files, {"w": W}, ({"x": X}, {"y": expected()}))


def test_round_trip_in_the_order_of_the_operators(tmp_path):
    probes = [Probe(1, 3, np.arange(6.0)), Probe(0, 2, np.ones(6))]
    got = load_trace(tmp_path, save(tmp_path, probes))
    assert [(probe.operator, probe.tensor) for probe in got] == [(0, 2), (1, 3)]
    assert np.array_equal(got[1].values, np.arange(6.0))


def test_a_bundle_without_one(tmp_path):
    made = save_bundle(tmp_path, bundle(), KERNEL_FILES, {"w": W}, ({"x": X}, {"y": expected()}))
    assert load_trace(tmp_path, made) == ()


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (Probe(2, 3, np.ones(6)), "no operator 2 or tensor 3"),
        (Probe(-1, 3, np.ones(6)), "no operator -1"),
        (Probe(0, 4, np.ones(6)), "no operator 0 or tensor 4"),
        (Probe(0, 3, np.ones(5)), r"operator 0: wanted float64\[6\], got float64\[5\]"),
        (Probe(0, 3, np.ones(6, np.float32)), r"wanted float64\[6\], got float32\[6\]"),
    ],
    ids=["operator", "negative", "tensor", "length", "dtype"],
)
def test_a_trace_of_another_bundle(tmp_path, probe, message):
    made = save(tmp_path, [probe])
    with pytest.raises(ModelError, match=message):
        load_trace(tmp_path, made)


@pytest.mark.parametrize("data", [b"", b"PK no archive"], ids=["empty", "no archive"])
def test_a_damaged_trace(tmp_path, data):
    made = save(tmp_path, [])
    (tmp_path / TRACE_FILE).write_bytes(data)
    with pytest.raises(ModelError, match="cannot be read"):
        load_trace(tmp_path, made)
