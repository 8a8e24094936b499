"""A bundle by hand: y = (x + 1) * w / 2, in two operators, with a workspace and a number as arguments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tvm_fuse.core.manifest import Source
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.cuda.bundle import (
    Bundle,
    Call,
    Image,
    Operand,
    Operator,
    Output,
    Port,
    Provenance,
    Tensor,
    Workspace,
)
from tvm_fuse.cuda.bundle_files import measure_draw, save_bundle
from tvm_fuse.cuda.launch import Launch, Parameter

SHAPE = (2, 3)
X = np.arange(6, dtype=np.float32).reshape(SHAPE)
W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(SHAPE)

KERNELS = (
    Launch("add_one", (3, 1, 1), (2, 1, 1), 0, (Parameter("out", "float32"), Parameter("in", "float32"))),
    Launch(
        "scale",
        (1, 1, 1),
        (6, 1, 1),
        64 * 1024,
        (
            Parameter("out", "float32"),
            Parameter("in", "float32"),
            Parameter("weight", "float32"),
            Parameter("factor", "float32", 4, False),
        ),
    ),
)

KERNEL_FILES = {
    "kernels.cu": b"// CUDA C++\n",
    "kernels.sm_80.cubin": b"\x7fELF 80",
    "kernels.sm_90.cubin": b"\x7fELF 90",
    "kernels.sm_80.ptx": b"// PTX",
}


def tensor(index):
    return Operand("tensor", index)


def expected(x=X, w=W):
    return (x + np.float32(1)) * w * np.float32(0.5)


def bundle(**changes):
    made = Bundle(
        model="by hand",
        provenance=Provenance(Source("by_hand.onnx", "ab" * 32), {"tvm-fuse": "0.1.0"}, "cuda -arch=sm_90"),
        inputs=(Port("x", 0),),
        outputs=(Output("y", 3, Tolerance(1e-6, 1e-6, "by hand")),),
        parameters=(Port("w", 1),),
        seed=7,
        draws=(),
        operators=(
            Operator("add", (Call("add_one", (Operand("workspace", 0), tensor(0))),)),
            Operator(
                "multiply",
                (
                    Call("add_one", (tensor(2), tensor(0))),
                    Call("scale", (tensor(3), tensor(2), tensor(1), Operand("immediate", 0.5))),
                ),
            ),
        ),
        kernels=KERNELS,
        tensors=tuple(Tensor(SHAPE, "float32", storage) for storage in range(4)),
        storages=(24, 24, 24, 24),
        workspaces=(Workspace(256, 24),),
        images=(
            Image("sm_80", "cubin", "kernels.sm_80.cubin"),
            Image("sm_80", "ptx", "kernels.sm_80.ptx"),
            Image("sm_90", "cubin", "kernels.sm_90.cubin"),
        ),
    )
    return replace(made, **changes)


def save(folder, made=None, *, w=W, y=None):
    """Write a bundle; a ``y`` of one's own replaces the right golden output."""
    golden = {"x": X}, {"y": expected(w=w) if y is None else y}
    return save_bundle(folder, made or bundle(), KERNEL_FILES, {"w": w}, golden)


def seeded(**changes):
    return bundle(draws=(measure_draw(W),), **changes)
