"""The bundles of the C++ tests: ``python -m tests.native.testdata`` writes ``native/testdata`` again."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.support import bundles
from tests.support.onnx_models import Builder
from tvm_fuse.cuda.bundle_files import load_bundle, load_golden, load_parameters
from tvm_fuse.cuda.emulator.translate import translate

TESTDATA = Path(__file__).resolve().parents[2] / "native" / "testdata"


def model():
    """A convolution, a pool in two kernels, a dense layer and a softmax: all operands but numbers."""
    b = Builder()
    x = b.input("image", (1, 2, 6, 6))
    y = b.op("GlobalAveragePool", b.relu(b.batch_norm(b.conv(x, 4, pad=1, bias=True))))
    weight, bias = b.const(b.rng.standard_normal((3, 4))), b.const(b.rng.standard_normal(3))
    scores = b.op("Gemm", b.op("Flatten", y), weight, bias, transB=1, name="scores")
    return b.build([b.op("Softmax", scores, axis=1, name="classes"), scores])


def export(folder):
    """The model as ``tvm-fuse export`` writes it."""
    from tvm_fuse.relay.export import ExportOptions, export_file

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "net.onnx"
        file.write_bytes(model().SerializeToString())
        return export_file(file, folder, "cuda -arch=sm_80", ExportOptions(seed=3))


def emulated_kernels(folder):
    """Kernels of a bundle as C++ for the emulator."""
    return translate((folder / "kernels.cu").read_text(encoding="utf-8"), checked=False)


def golden_header(folder):
    """The golden arrays of a bundle as C."""
    inputs, outputs = load_golden(folder, load_bundle(folder))
    lines = ["/* golden.npz of net/ as C; python -m tests.native.testdata writes it. */"]
    for name, array in {**inputs, **outputs}.items():
        numbers = ", ".join(f"{value:.8e}f" for value in array.flat)
        lines.append(f"static const float golden_{name}[{array.size}] = {{{numbers}}};")
    return "\n".join(lines) + "\n"


def save_by_hand(folder, *, is_seeded=False):
    """The bundle that tests/runner/fake_cuda.c can run; one with a seed has the output of what is drawn."""
    if not is_seeded:
        return bundles.save(folder)
    drawn = load_parameters(folder, bundles.save(folder, bundles.seeded()))
    return bundles.save(folder, bundles.seeded(), y=bundles.expected(w=drawn["w"]))


def main():
    """Write everything again."""
    shutil.rmtree(TESTDATA, ignore_errors=True)
    export(TESTDATA / "net")
    (TESTDATA / "net_kernels.cpp").write_text(emulated_kernels(TESTDATA / "net"), encoding="utf-8")
    (TESTDATA / "net_golden.h").write_text(golden_header(TESTDATA / "net"), encoding="utf-8")
    save_by_hand(TESTDATA / "by_hand")
    save_by_hand(TESTDATA / "by_hand_seeded", is_seeded=True)


if __name__ == "__main__":
    main()
