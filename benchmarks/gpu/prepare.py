"""Everything that a GPU is needed for, as one file: ``python benchmarks/gpu/prepare.py -o FOLDER``.

Needs TVM and no GPU; ``run.py`` is the other half. Each model becomes a bundle in three forms with machine
code, weights drawn from a seed, golden outputs and a trace, and a network for PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.layers import LAYERS, SMALL_LAYERS, Layer, export_by_hand, make_layer
from benchmarks.gpu.network import save_network
from benchmarks.gpu.run import read_revision
from benchmarks.gpu.suite import ARCHIVE, Entry, pack
from benchmarks.gpu.variants import export_forms
from examples.models import MODELS, save
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.cuda.bundle import Bundle
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.load import load_model

#: What may be carried to a GPU.
MOST_BYTES = 64 << 20

#: Limits of every GPU (CUDA C++ Programming Guide, technical specifications per compute capability).
MOST_BLOCKS, MOST_THREADS = (2**31 - 1, 65535, 65535), 1024

Say = Callable[[str], None]


def prepare_model(
    name: str, batch: int, image: int, archs: tuple[str, ...], root: Path, say: Say
) -> Iterator[Entry]:
    """A model in all forms, at one size."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{name}.onnx"
        proto = MODELS[name](batch=batch, image=image)
        save(proto, file)
        model = load_model(file, shapes={})
        start = time.monotonic()
        title = f"{name}-{batch}"
        for form, bundle in export_forms(model, file, root / title, archs, ("fused", "unfused", "topi")):
            check_launches(bundle)
            yield Entry(name, batch, form, f"{title}/{form}")
            say(f"{title} {form}: {bundle.launch_count} launches, {time.monotonic() - start:.0f} s")
            start = time.monotonic()
        save_network(proto, make_inputs(model.inputs, seed=0), root / title / "torch")
        yield Entry(name, batch, "torch", f"{title}/torch")
        say(f"{title} torch: {time.monotonic() - start:.0f} s")


def prepare_layer(layer: Layer, archs: tuple[str, ...], root: Path, say: Say) -> Iterator[Entry]:
    """A layer as the generated kernel, as the one by hand, and for PyTorch."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{layer.name}.onnx"
        proto = make_layer(layer)
        save(proto, file)
        model = load_model(file, shapes={})
        folder = root / layer.name
        ((_, generated),) = export_forms(model, file, folder, archs, ("fused",))
        by_hand = export_by_hand(layer, generated, folder / "fused", folder / "by_hand", archs)
        for bundle in (generated, by_hand):
            check_launches(bundle)
        save_network(proto, make_inputs(model.inputs, seed=0), folder / "torch")
    for form in ("fused", "by_hand", "torch"):
        yield Entry(layer.name, 1, form, f"{layer.name}/{form}", is_layer=True)
    say(f"{layer.name}: {generated.launch_count} and {by_hand.launch_count} launches")


def check_launches(bundle: Bundle) -> None:
    """No GPU could launch what is beyond these limits.

    Raises:
        ValueError: A kernel is.
    """
    for kernel in bundle.kernels:
        if (
            any(size > most for size, most in zip(kernel.grid, MOST_BLOCKS))
            or kernel.threads_per_block > MOST_THREADS
        ):
            raise ValueError(f"{kernel.symbol}: a grid of {kernel.grid} and blocks of {kernel.block} threads")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a suite; the exit code is 1 when it is too large to carry."""
    args = make_parser().parse_args(argv)
    archs, start, revision = tuple(args.arch or ("sm_90",)), time.monotonic(), read_revision()
    models, batches, image, layers = args.models or list(MODELS), args.batches, args.image, LAYERS
    if args.small:
        models, batches, image, layers = args.models or ["mobilenet_v2"], [1], 32, SMALL_LAYERS

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as scratch:
        root, entries = Path(scratch), []
        for batch in batches:
            for name in models:
                entries += prepare_model(name, batch, image, archs, root, say)
        for layer in layers:
            entries += prepare_layer(layer, archs, root, say)
        about = {
            "command": " ".join(
                ["python benchmarks/gpu/prepare.py", *(sys.argv[1:] if argv is None else argv)]
            ),
            "date": time.strftime("%Y-%m-%d"),
            "revision": revision,
            "tvm": find_tvm().version,
            "image": image,
            "archs": list(archs),
        }
        size_bytes = pack(root, args.output / ARCHIVE, about, entries)
    say(f"{args.output / ARCHIVE}: {len(entries)} entries, {size_bytes / 1e6:.1f} MB")
    if size_bytes > MOST_BYTES:
        print(
            f"error: more than {MOST_BYTES / 1e6:.1f} MB, which is what can be carried to a GPU",
            file=sys.stderr,
        )
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Prepare all that benchmarks/gpu/run.py needs, without a GPU."
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help=f"for {ARCHIVE}")
    parser.add_argument("--arch", action="append", metavar="sm_90", help="architecture; may be repeated")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), help="default: all three")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="default: 1 16")
    parser.add_argument("--image", type=int, default=224, help="height and width (default: 224)")
    parser.add_argument("--small", action="store_true", help="a small model and layer, to try the scripts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
