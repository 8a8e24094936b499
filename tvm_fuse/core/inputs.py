"""Seeded inputs for comparing and timing models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_fuse.core.graph import Array, TensorSpec

__all__ = ["make_inputs"]


def make_inputs(inputs: Sequence[TensorSpec], seed: int) -> dict[str, Array]:
    """Seeded inputs: standard normal for floats, 0 or 1 for integers and booleans.

    Args:
        inputs: Static inputs.
        seed: Seed of the generator.

    Returns:
        Input name -> array.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for spec in inputs:
        shape = tuple(int(dim) for dim in spec.shape)
        drawn = rng.standard_normal(shape) if spec.dtype.startswith("float") else rng.integers(0, 2, shape)
        arrays[spec.name] = np.asarray(drawn).astype(spec.dtype)
    return arrays
