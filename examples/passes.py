"""The passes by themselves, mixed with TVM's own: convolution, batch norm and ReLU into one kernel.

Run it with ``python examples/passes.py``.
"""

from __future__ import annotations

import numpy as np

import tvm_fuse
from tvm_fuse.relay.compat import load_tvm

tvm = load_tvm()  # or, with a TVM of your own that has Relay: import tvm
from tvm import relay  # noqa: E402
from tvm.contrib import graph_executor  # noqa: E402


def make_block(channels: int = 64, epsilon: float = 1e-3) -> tuple:
    """A module conv2d -> batch_norm -> relu at 1x3x224x224, and its parameters."""
    data = relay.var("data", shape=(1, 3, 224, 224))
    weight = relay.var("weight", shape=(channels, 3, 3, 3))
    names = ("gamma", "beta", "mean", "variance")
    bn_params = [relay.var(name, shape=(channels,)) for name in names]
    out = relay.nn.conv2d(data, weight, channels=channels, kernel_size=(3, 3), padding=(1, 1))
    out = relay.nn.relu(relay.nn.batch_norm(out, *bn_params, epsilon=epsilon)[0])
    rng = np.random.default_rng(0)
    params = {
        "weight": rng.normal(0, 0.2, (channels, 3, 3, 3)),
        "gamma": rng.normal(1, 0.3, channels),
        "beta": rng.normal(0, 0.3, channels),
        "mean": rng.normal(0, 0.3, channels),
        "variance": rng.uniform(0.1, 2.0, channels),
    }
    arrays = {name: tvm.nd.array(value.astype("float32")) for name, value in params.items()}
    return tvm.IRModule.from_expr(out), arrays


def run(library: tvm.runtime.Module, data: np.ndarray) -> np.ndarray:
    """One inference on the CPU."""
    executor = graph_executor.GraphModule(library["default"](tvm.cpu(0)))
    executor.set_input("data", data)
    executor.run()
    return executor.get_output(0).numpy()


def main() -> None:
    """Fold and fuse the block, build it, and compare it with the block as it was."""
    module, params = make_block()
    target = "llvm"
    passes = tvm.transform.Sequential(
        [
            relay.transform.SimplifyExpr(),  # any pass of TVM
            tvm_fuse.transform.AlignEpsilon({"batch_norm_0": 1e-3}),
            tvm_fuse.transform.FoldBatchNorm(),
            tvm_fuse.transform.FuseChains(target),
        ]
    )
    module["main"] = relay.build_module.bind_params_by_name(module["main"], params)
    fused = passes(module)
    print(tvm_fuse.last_report())

    data = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype("float32")
    got = run(relay.build(fused, target=target), data)
    with tvm.transform.PassContext(opt_level=0):
        want = run(relay.build(module, target=target), data)
    print(f"largest difference from the unfused block: {np.abs(got - want).max():.2e}")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main()
