"""``tvm-fuse export``: what it writes and says, its options, what it refuses."""

from __future__ import annotations

import pytest

from tests.support.onnx_models import Builder
from tvm_fuse import cli
from tvm_fuse.cuda.bundle_files import load_bundle

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

ON = ("--target", "cuda -arch=sm_90", "-o", "out")


def net():
    b = Builder()
    x = b.input("x", (1, 3, "h", 6))
    return b.build([b.relu(b.batch_norm(b.conv(x, 4, name="conv"), name="bn"), name="y")])


@pytest.fixture
def export(tmp_path, monkeypatch, capfd):
    """``export(*options)`` on a machine with neither a GPU nor nvcc: exit code and both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for module in ("target", "cuda_hook"):
        monkeypatch.setattr(f"tvm_fuse.relay.{module}.has_cuda_device", lambda: False)
    (tmp_path / "net.onnx").write_bytes(net().SerializeToString())

    def call(*options, shape="x=1x3x6x6"):
        capfd.readouterr()
        return (cli.main(["export", "net.onnx", "--shape", shape, *options]), *capfd.readouterr())

    return call


def test_a_bundle_is_written(export, tmp_path):
    code, out, _ = export(*ON, "--arch", "sm_80")
    assert code == 0
    bundle = load_bundle(tmp_path / "out")
    assert bundle.launch_count == 1
    for part in (
        "net for cuda",
        "source      net.onnx (SHA-256 ",
        "inputs      x float32[1, 3, 6, 6]",
        "outputs     y float32[1, 4, 4, 4]",
        "kernels     1, launched 1 times an inference",
        "code        cubin for sm_90, cubin for sm_80, ptx for sm_80 (NVRTC ",
        "weights     2, in params.npz",
        "wrote out",
    ):
        assert part in out
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "out"}


def test_options_arrive(export, tmp_path):
    options = ("--seeded", "--seed", "7", "--atol", "0.5", "--epsilon", "bn=1e-3", "--align-epsilon")
    code, out, _ = export(*ON, *options)
    assert code == 0
    assert "drawn from a seed: for timing only" in out
    bundle = load_bundle(tmp_path / "out")
    assert (bundle.is_seeded, bundle.seed, bundle.outputs[0].tolerance.atol) == (True, 7, 0.5)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--target", "cuda", "-o", "out"), 2, "no GPU architecture is named"),
        (("--target", "llvm", "-o", "out"), 2, "a bundle holds CUDA kernels"),
        ((*ON, "--arch", "90"), 2, "'90' is no GPU architecture"),
        (("--target", "cuda -arch=sm_90", "-o", "net.onnx"), 2, "-o net.onnx: "),
        ((*ON, "--epsilon", "bn=1e-3"), 3, "epsilon"),
        ((*ON, "--epsilon", "other=1e-3"), 2, "other"),
    ],
)
def test_what_it_refuses(export, tmp_path, options, code, message):
    got, out, err = export(*options)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "out").exists()


def test_the_folder_is_required(export, capfd):
    with pytest.raises(SystemExit) as caught:
        export()
    assert caught.value.code == 2
    assert "-o/--output" in capfd.readouterr().err
