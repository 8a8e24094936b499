"""The main job on a real model: the text-direction classifier of PP-OCR, with trained weights.

The model comes with the PyPI package ``rapidocr-onnxruntime`` (only its model file is used); it
tells whether a line of text is upside down. `make demo` runs this file.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tvm_fuse.cli import main

PACKAGE = "rapidocr_onnxruntime"
MODEL = "ch_ppocr_mobile_v2.0_cls_infer.onnx"


def find_model() -> Path:
    """Find the model file inside the installed package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder, "models", MODEL)
        if file.is_file():
            return file
    sys.exit(f"error: {MODEL} is not installed\nhint: pip install --no-deps rapidocr-onnxruntime==1.4.4")


if __name__ == "__main__":
    sys.exit(main(["run", str(find_model()), "--shape", "x=1x3x48x192", *sys.argv[1:]]))
