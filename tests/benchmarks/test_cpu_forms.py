"""The forms that are timed on a CPU compute the same, in as many kernels as they should."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.support.lazy import Lazy

pytestmark = pytest.mark.relay

forms = Lazy("benchmarks.cpu_forms")
peak = Lazy("benchmarks.peak")
work = Lazy("benchmarks.kernel_work")
build = Lazy("tvm_fuse.relay.build")
fuse = Lazy("tvm_fuse.relay.fuse")
load = Lazy("tvm_fuse.relay.load")
relay, tvm = Lazy("tvm_fuse.relay.base", "relay"), Lazy("tvm_fuse.relay.base", "tvm")

CHANNELS, SIZE = 32, 28


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A 1x1 convolution, which takes the transform at the edge in; 3x3 convolution, batch norm, relu."""
    draw = np.random.default_rng(0)
    data = relay.var("input", shape=(1, CHANNELS, SIZE, SIZE))
    first, weight = (
        relay.const(draw.normal(0, 0.1, (CHANNELS, CHANNELS, size, size)).astype("float32"))
        for size in (1, 3)
    )
    norm = [relay.const(draw.uniform(0.5, 1.5, CHANNELS).astype("float32")) for _ in range(4)]
    data = relay.nn.conv2d(data, first, channels=CHANNELS, kernel_size=(1, 1))
    conv = relay.nn.conv2d(data, weight, padding=(1, 1), channels=CHANNELS, kernel_size=(3, 3))
    module = tvm.IRModule.from_expr(relay.nn.relu(relay.nn.batch_norm(conv, *norm)[0]))
    path = tmp_path_factory.mktemp("model") / "model.json"
    path.write_text(tvm.ir.save_json(module))
    return load.load_model(path, shapes={})


def run(library, image):
    module = tvm.contrib.graph_executor.GraphModule(library["default"](tvm.cpu(0)))
    module.set_input("input", image)
    module.run()
    return module.get_output(0).numpy()


def operators(library):
    """How many kernels compute what; those that only transform, at the edges, left out."""
    names = (call.function for call in build.read_calls(library.get_graph_json()))
    plain = (name.split("fused_")[1].replace("nn_contrib_", "").replace("nn_", "") for name in names)
    counted = Counter(name.rstrip("_0123456789") for name in plain)
    del counted["layout_transform"]
    return counted


def test_all_forms_of_a_layer(model):
    target = forms.target_of(1)
    fused = fuse.fuse_model(model, target, fuse.FuseOptions(records=None))
    libraries = {
        "fused": build.build_fused(fused.module, target).library,
        "folded": forms.build_apart(fused.laid_out, target),
        "unfolded": forms.build_apart(forms.lay_out_unfolded(fused, target), target),
        "stock": forms.build_stock(model.module, forms.STOCK_TARGETS["tvm_opt_level_3"]),
    }
    kernels = {name: operators(library) for name, library in libraries.items()}
    totals = {name: sum(counted.values()) for name, counted in kernels.items()}
    assert totals == {"fused": 2, "folded": 4, "unfolded": 5, "stock": 2}
    assert kernels["unfolded"]["multiply"] == 1
    assert kernels["folded"]["multiply"] == 0
    image = np.random.default_rng(1).standard_normal((1, CHANNELS, SIZE, SIZE)).astype("float32")
    results = {name: run(library, image) for name, library in libraries.items()}
    for result in results.values():
        np.testing.assert_allclose(result, results["stock"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("is_winograd", "what"), [(False, "3x3 conv2d"), (True, "conv2d_winograd")], ids=["direct", "winograd"]
)
def test_what_a_kernel_computes(model, monkeypatch, is_winograd, what):
    """Operations are those of the direct sum, whatever the algorithm."""
    if not is_winograd:
        monkeypatch.setattr(build._load(), "use_winograd", lambda module, target: module)
    target = forms.target_of(1)
    fused = fuse.fuse_model(model, target, fuse.FuseOptions(records=None))
    recorder = work.WorkRecorder()
    artifact = build.build_fused(fused.module, target, [recorder])
    assert recorder.work.keys() == {call.function for call in artifact.calls}
    (layer,) = (each for each in recorder.work.values() if "relu" in each.what)
    pixels = SIZE * SIZE * CHANNELS
    assert layer.flops == pixels * (2 * 9 * CHANNELS + 2)
    assert layer.what.startswith(f"{what} + add + relu, 1x")


def test_the_loop_of_the_peak_is_computed():
    loop = peak.Peak(forms.target_of(1))
    assert loop.measure() > 1e8
    assert set(loop.result.ravel()) == {float(peak.TERMS)}
    assert loop.flops == 2 * loop.result.size * peak.TERMS
