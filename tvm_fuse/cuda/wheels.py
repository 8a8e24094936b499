"""Files of NVIDIA's pip packages, which share the namespace package ``nvidia``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["find_in_wheels"]


def find_in_wheels(name: str) -> Path | None:
    """Finds a file or folder of NVIDIA's pip packages, in whichever site-packages it lies.

    Args:
        name: Path below the namespace package, as ``cuda_nvrtc/lib/libnvrtc.so.12``.

    Returns:
        Where it is; None when no pip package holds it.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return next((Path(folder, name) for folder in folders if Path(folder, name).exists()), None)
