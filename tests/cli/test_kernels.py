"""``tvm-fuse kernels``: the table, the JSON, the source of one kernel, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.support.onnx_models import Builder
from tvm_fuse import cli

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

ON = ("--target", "cuda -arch=sm_90")


def net():
    b = Builder()
    x = b.input("x", (1, 3, 6, 6))
    return b.build([b.relu(b.batch_norm(b.conv(x, 4, name="conv"), name="bn"), name="y")])


@pytest.fixture
def kernels(tmp_path, monkeypatch, capfd):
    """``kernels(*options)`` on a machine with neither a GPU nor nvcc: exit code and both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for module in ("target", "cuda_hook"):
        monkeypatch.setattr(f"tvm_fuse.relay.{module}.has_cuda_device", lambda: False)
    (tmp_path / "net.onnx").write_bytes(net().SerializeToString())

    def call(*options):
        capfd.readouterr()
        return (cli.main(["kernels", "net.onnx", *options]), *capfd.readouterr())

    return call


def test_table(kernels, tmp_path):
    code, out, _ = kernels(*ON)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("net for sm_90    (NVRTC ")
    assert lines[1] == "1 CUDA kernels, 0 with spills, 0 with a stack"
    assert lines[3].split()[:8] == ["calls", "spill", "stack", "regs", "smem", "grid", "block", "occ"]
    assert lines[4].endswith("fused_nn_conv2d_add_nn_relu_kernel")
    assert lines[4].split()[0] == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_json(kernels):
    code, out, _ = kernels(*ON, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == {"name": "tvm-fuse/kernels", "version": 1}
    assert document["compiler"].startswith("NVRTC ")
    assert document["arch"] == "sm_90"
    (kernel,) = document["kernels"]
    assert len(kernel["launch"]["grid"]) == len(kernel["launch"]["block"]) == 3
    assert kernel["resources"]["registers_per_thread"] > 0
    assert set(kernel["resources"]["limited_by"]) <= {"threads", "registers", "shared memory", "blocks"}
    assert kernel["resources"]["symbol"] == kernel["launch"]["symbol"]


@pytest.mark.parametrize("name", ["relu", "fused_nn_conv2d_add_nn_relu_kernel"])
def test_source_of_one_kernel(kernels, name):
    code, out, _ = kernels(*ON, "--source", name)
    assert code == 0
    assert out.count("__global__") == 1
    assert out.startswith('extern "C" __global__ void')
    assert out.endswith("}\n")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "-arch=sm_75|sm_80|sm_86|sm_89|sm_90"),
        (("--target", "llvm"), 2, "has no CUDA kernels"),
        (("--target", "cuda -arch=sm_61"), 2, "sm_61"),
        ((*ON, "--compiler", "nvcc"), 4, "'nvcc' is not there"),
        (
            (*ON, "--source", "pool"),
            2,
            "no kernel has 'pool' in the name: fused_nn_conv2d_add_nn_relu_kernel",
        ),
    ],
)
def test_refusals(kernels, options, code, message):
    got, out, err = kernels(*options)
    assert (got, out) == (code, "")
    assert message in err
    assert "hint: " in err
