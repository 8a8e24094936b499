"""The forms of a model that ``cpu.py`` times: built once into shared libraries, then only loaded.

======================  =====================================================================================
``tvm_fuse``            folded, fused, our layouts and schedules
``folded_apart``        the same layouts and schedules, batch norms folded, each operator a kernel of its own
``unfolded_apart``      the same, and batch norms not folded: a multiply and an add after the convolution
``tvm_opt_level_3``     TVM alone: all its passes, its own layouts and schedules, not tuned
``tvm_plain_llvm``      the same for the target `llvm`, whose code runs on any x86-64
``onnxruntime``         ONNX Runtime's CPU provider, all its optimizations
``openvino``            OpenVINO, float32 arithmetic (it would take bfloat16 where there is hardware for it)
======================  =====================================================================================

Weights are random and inputs are images of 224x224. All forms must give the same 1000 numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np

from benchmarks.interleave import Contestant
from examples.models import MODELS, save
from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import build_fused
from tvm_fuse.relay.constant_pass import fold_all_constants, fold_constants
from tvm_fuse.relay.fuse import FusedModel, FuseOptions, fuse_model
from tvm_fuse.relay.layout_pass import PREFIX_PASSES, decide_layout
from tvm_fuse.relay.load import load_model
from tvm_fuse.relay.target import resolve_target
from tvm_fuse.relay.winograd_pass import use_winograd

__all__ = [
    "STOCK_TARGETS",
    "build_apart",
    "build_forms",
    "build_stock",
    "lay_out_unfolded",
    "open_forms",
    "target_of",
]

INPUT = "input"
OURS = ("tvm_fuse", "folded_apart", "unfolded_apart")
#: TVM alone -> the target it is built for.
STOCK_TARGETS = {"tvm_opt_level_3": f"llvm -mcpu={detect_cpu()}", "tvm_plain_llvm": "llvm"}

#: Largest difference of two forms' results, as a share of the largest result: float32 sums in another order.
_TOLERANCE = 1e-3


def target_of(threads: int) -> Any:
    """This machine's CPU, for a number of threads."""
    return resolve_target(f"llvm -mcpu={detect_cpu()} -num-cores={threads}")


def make_image(batch: int) -> np.ndarray:
    """The input of all forms."""
    return np.random.default_rng(0).standard_normal((batch, 3, 224, 224)).astype("float32")


def build_forms(folder: Path, name: str, batch: int, threads: tuple[int, ...]) -> None:
    """Write a model and the libraries of its forms.

    Args:
        folder: Where to.
        name: One of ``examples.models.MODELS``.
        batch: Images.
        threads: Numbers of threads. TVM's own schedules are the same for all.
    """
    file = _model_file(folder, name, batch)
    save(MODELS[name](batch=batch), file)
    model, target = load_model(file, shapes={}), target_of(max(threads))
    fused = fuse_model(model, target, FuseOptions(records=None))
    unfolded = lay_out_unfolded(fused, target)
    for count in threads:
        on = target_of(count)
        _export(build_fused(fused.module, on).library, folder, name, batch, count, "tvm_fuse")
        _export(build_apart(fused.laid_out, on), folder, name, batch, count, "folded_apart")
        _export(build_apart(unfolded, on), folder, name, batch, count, "unfolded_apart")
    for form, text in STOCK_TARGETS.items():
        _export(build_stock(model.module, text), folder, name, batch, None, form)


def lay_out_unfolded(fused: FusedModel, target: Any) -> Any:
    """The model as it came in the layouts of the fused one; TVM must not fold batch norms, either."""
    with tvm.transform.PassContext(disabled_pass=["FoldScaleAxis", "BackwardFoldScaleAxis"]):
        return decide_layout(fused.reference, target)


def build_apart(module: Any, target: Any) -> Any:
    """Build a module in its final layouts with each operator a kernel of its own: as ``build_fused`` does."""
    module = use_winograd(module, target)
    config = {"tir.disable_assert": True, "relay.FuseOps.max_depth": 1}
    with tvm.transform.PassContext(opt_level=3, disabled_pass=list(PREFIX_PASSES), config=config):
        return relay.build(module, target=target)


def build_stock(module: Any, text: str) -> Any:
    """TVM's own best effort for a target without tuning: every pass of opt_level 3, its own schedules.

    Operators on constants are computed in NumPy between the passes. TVM compiles each of them, which gives
    the same graph and takes six times as long.
    """
    target = tvm.target.Target(text)
    module = fold_constants(relay.transform.SimplifyInference()(relay.transform.InferType()(module)))
    prefix = tvm.get_global_func("relay.backend.GetPassPrefixSeq")(True, False)
    with target, tvm.transform.PassContext(opt_level=3, disabled_pass=["FoldConstant"]):
        module = prefix(module)
    module = fold_all_constants(module)
    with tvm.transform.PassContext(opt_level=3):
        return relay.build(module, target=target)


def open_forms(folder: Path, name: str, batch: int, threads: int) -> list[Contestant]:
    """Load every form of a model, and compare their results.

    Args:
        folder: Where ``build_forms`` wrote.
        name: The model.
        batch: Images.
        threads: Threads of each form; ``TVM_NUM_THREADS`` must say the same.

    Returns:
        The contestants, tvm-fuse first. Those of TVM and OpenVINO have their input already, ONNX Runtime
        reads the array where it is.

    Raises:
        SystemExit: A form computes something else.
    """
    image = make_image(batch)
    file = _model_file(folder, name, batch)
    pairs = {form: _open_tvm(_library_file(folder, name, batch, threads, form), image) for form in OURS}
    for form in STOCK_TARGETS:
        pairs[form] = _open_tvm(_library_file(folder, name, batch, None, form), image)
    pairs["onnxruntime"] = _open_onnxruntime(file, image, threads)
    pairs["openvino"] = _open_openvino(file, image, threads)
    wanted = pairs["onnxruntime"][1]()
    for form, (_, result) in pairs.items():
        error = float(np.abs(result() - wanted).max() / np.abs(wanted).max())
        if not error < _TOLERANCE:
            raise SystemExit(f"{name}, batch {batch}: {form} differs from ONNX Runtime by {error:.1e}")
    return [Contestant(form, run) for form, (run, _) in pairs.items()]


#: One inference, and what runs it and returns its result.
Opened = tuple[Callable[[], object], Callable[[], np.ndarray]]


def _open_tvm(file: Path, image: np.ndarray) -> Opened:
    device = tvm.cpu(0)
    module = tvm.contrib.graph_executor.GraphModule(tvm.runtime.load_module(str(file))["default"](device))
    module.set_input(INPUT, tvm.nd.array(image, device))

    def result() -> np.ndarray:
        module.run()
        return module.get_output(0).numpy()

    return module.run, result


def _open_onnxruntime(file: Path, image: np.ndarray, threads: int) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def result() -> np.ndarray:
        return session.run(None, {INPUT: image})[0]

    return result, result


def _open_openvino(file: Path, image: np.ndarray, threads: int) -> Opened:
    import openvino

    core = openvino.Core()
    hints = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = core.compile_model(core.read_model(str(file)), "CPU", hints).create_infer_request()
    request.set_input_tensor(openvino.Tensor(image, shared_memory=True))

    def result() -> np.ndarray:
        request.infer()
        return np.array(request.get_output_tensor().data)

    return request.infer, result


def _model_file(folder: Path, name: str, batch: int) -> Path:
    return folder / f"{name}-b{batch}.onnx"


def _library_file(folder: Path, name: str, batch: int, threads: int | None, form: str) -> Path:
    """A library's place; ``threads`` is None where it does not depend on them."""
    on = "" if threads is None else f"-t{threads}"
    return folder / f"{name}-b{batch}{on}-{form}.so"


def _export(library: Any, folder: Path, name: str, batch: int, threads: int | None, form: str) -> None:
    library.export_library(str(_library_file(folder, name, batch, threads, form)))
