"""Traces of bundles: every operator's result, from the CPU, compared with its CUDA kernels one by one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.manifest import Source
from tvm_fuse.cuda.bundle_files import load_bundle, load_golden, load_parameters, save_bundle
from tvm_fuse.cuda.trace import load_trace

export = Lazy("tvm_fuse.relay.export")
load = Lazy("tvm_fuse.relay.load")
trace = Lazy("tvm_fuse.relay.trace")

pytestmark = [
    pytest.mark.relay,
    pytest.mark.cuda_codegen,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler"),
]

CUDA = "cuda -arch=sm_90"
ROOT = Path(__file__).resolve().parents[2]

#: In a process without TVM, as everywhere that the runner runs.
RUN = """
import dataclasses, json, sys
from pathlib import Path
from tvm_fuse.cuda.trace import load_trace
from tvm_fuse.runner.run import RunOptions, load
from tvm_fuse.runner.trace import check_operators
folder = Path(sys.argv[1])
with load(folder, RunOptions(device="emulator")) as loaded:
    checks = list(check_operators(loaded.network, loaded.bundle, load_trace(folder, loaded.bundle)))
print(json.dumps([[each.symbols, each.tensor, each.passed, each.error, each.strange] for each in checks]))
"""


def check(folder):
    """Symbols, tensor, whether it passed, error and strange elements of every result."""
    command = [sys.executable, "-W", "error", "-c", RUN, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def onnx_net():
    """Convolution, batch norm, ReLU, residual, pooling, dense."""
    b = Builder()
    y = b.relu(b.batch_norm(b.conv(b.input("image", (1, 3, 12, 12)), 8, pad=1, bias=True)))
    z = b.relu(b.op("Add", b.batch_norm(b.conv(y, 8, pad=1)), y))
    z = b.op("Flatten", b.op("GlobalAveragePool", z))
    scores = b.op(
        "Gemm", z, b.const(b.rng.standard_normal((5, 8))), b.const(b.rng.standard_normal(5)), transB=1
    )
    return b.build([b.op("Softmax", scores, axis=1, name="classes"), scores])


def export_net(folder, **options):
    (folder / "net.onnx").write_bytes(onnx_net().SerializeToString())
    made = export.ExportOptions(is_traced=True, seed=3, **options)
    return folder / "bundle", export.export_file(folder / "net.onnx", folder / "bundle", CUDA, made)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return export_net(tmp_path_factory.mktemp("traced"))


@pytest.mark.parametrize("is_seeded", [False, True], ids=["weights", "seeded"])
def test_every_operator_has_its_probes_and_passes(traced, tmp_path, is_seeded):
    folder, bundle = export_net(tmp_path, is_seeded=True) if is_seeded else traced
    assert bundle.is_seeded == is_seeded
    probes = load_trace(folder, bundle)
    assert [probe.operator for probe in probes] == list(range(len(bundle.operators)))
    checks = check(folder)
    assert [row[0] for row in checks] == [[call.symbol for call in each.calls] for each in bundle.operators]
    assert all(passed for _, _, passed, _, _ in checks)
    assert max(error for *_, error, _ in checks) < 1e-6
    assert all(np.abs(probe.values).max() > 0.01 for probe in probes)


def test_an_operator_that_is_wrong_is_the_first_to_fail(traced, tmp_path):
    """Its weights are others than the trace's; what comes before passes."""
    folder, bundle = traced
    parameters = load_parameters(folder, bundle)
    scores = next(name for name, array in parameters.items() if array.size == 40)
    parameters[scores] = parameters[scores] + np.float32(0.01)
    save_as(tmp_path, folder, bundle, parameters)
    passed = [row[2] for row in check(tmp_path)]
    first = passed.index(False)
    tensor = next(port.tensor for port in bundle.parameters if port.name == scores)
    readers = [index for index, each in enumerate(bundle.operators) if reads(each, tensor)]
    assert readers == [first]
    assert first > 0


def test_what_no_kernel_wrote_is_strange(traced, tmp_path):
    folder, bundle = traced
    call = next(call for each in bundle.operators for call in each.calls if reads_grid(bundle, call.symbol))
    kernels = [replace(k, grid=(1, 1, 1)) if k.symbol == call.symbol else k for k in bundle.kernels]
    save_as(tmp_path, folder, replace(bundle, kernels=tuple(kernels)), load_parameters(folder, bundle))
    symbols, _, passed, error, strange = next(row for row in check(tmp_path) if not row[2])
    assert symbols == [call.symbol]
    assert strange > 0
    assert not passed
    assert error == float("inf")


def reads(operator, tensor):
    return any(
        operand.kind == "tensor" and operand.value == tensor for c in operator.calls for operand in c.operands
    )


def reads_grid(bundle, symbol):
    return next(kernel for kernel in bundle.kernels if kernel.symbol == symbol).blocks > 1


def save_as(target, folder, bundle, parameters):
    files = {
        r.name: (folder / r.name).read_bytes() for r in bundle.files if r.name[:6] not in ("params", "golden")
    }
    save_bundle(target, bundle, files, parameters, load_golden(folder, bundle))


def test_an_operator_with_several_results(tmp_path):
    net = Net()
    parts = relay.split(net.input("x", (2, 12)), 3, axis=1)
    module = net.module(relay.nn.relu(parts[0]), relay.nn.softmax(relay.add(parts[1], parts[2])))
    options = export.ExportOptions(is_traced=True)
    source = Source("module", "00" * 32)
    bundle = export.export_model(load.model_from_module(module), source, tmp_path, CUDA, options)
    assert len(load_trace(tmp_path, load_bundle(tmp_path))) >= len(bundle.operators)
    assert all(row[2] for row in check(tmp_path))


def test_another_build_is_refused():
    net = Net()
    one = net.module(relay.nn.relu(net.dense(net.input("x", (2, 16)), 8)))
    with pytest.raises(InternalError, match=r"the graph has \d operators, its build 0"):
        trace._with_samples(relay.transform.FuseOps()(relay.transform.InferType()(one)), [])
