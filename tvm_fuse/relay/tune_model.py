"""The model of a schedule's speed: XGBoost over AutoScheduler's features, alike for like schedules.

TVM lists a program's stores, and buffers that tie in one store, in the order of addresses in memory. A sum of
predictions then differs in its last digit and a trained tree in its cuts, so that the same seed would propose
something else. Here both lists are put in order first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_fuse.relay.base import tvm

__all__ = ["ScheduleModel", "put_in_order"]

_TVM = tvm.auto_scheduler.cost_model.xgb_model
_FEATURES = tvm.auto_scheduler.feature
#: A store has the features of so many buffers, the largest first.
_BUFFERS = _FEATURES.DEFAULT_MAX_N_BUFS
_NAMES = list(_FEATURES.get_per_store_feature_names())
_FIRST, _END = _NAMES.index("B0.acc_type.kRead"), _NAMES.index("arith_intensity_curve_0")
#: TVM's own order of buffers is kept where it says something.
_LARGEST_FIRST = [_NAMES.index(name) - _FIRST for name in ("B0.lines", "B0.bytes")]


class ScheduleModel(_TVM.XGBModel):  # type: ignore[misc,name-defined]
    """TVM's ``XGBModel``, with the same scores in every process for the same schedules and measurements.

    Args:
        warm_up: Measurements before its predictions are used; chance decides until then.

    Raises:
        ImportError: XGBoost is not installed.
    """

    def __init__(self, warm_up: int) -> None:
        super().__init__(verbose_eval=0, num_warmup_sample=warm_up)
        self.inputs_feature_cache: list[npt.NDArray[np.float32]] = []

    def update(self, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Train with this, and all that came before."""
        if not inputs:
            return
        features, _, _ = _FEATURES.get_per_store_features_from_measure_pairs(inputs, results)
        # TVM extracts nothing of what is in here.
        self.inputs_feature_cache = [*self.inputs_feature_cache, *map(put_in_order, features)]
        super().update(inputs, results)

    def predict(self, task: Any, states: Sequence[Any]) -> npt.NDArray[np.floating[Any]]:
        """A score for each state, more is faster; minus infinity for one that TVM cannot lower."""
        features = [put_in_order(one) for one in _FEATURES.get_per_store_features_from_states(states, task)]
        if self.is_trained:
            matrix, programs = _TVM.feature_to_pack_sum_xgbmatrix(features)
            scores = _TVM.predict_throughput_pack_sum(self.bst.predict(matrix), programs)
        else:
            scores = np.random.uniform(0, 1, len(features))  # noqa: NPY002 (TVM's own draw, and seeded with it)
        return np.where([one.any() for one in features], scores, -np.inf)

    @property
    def is_trained(self) -> bool:
        """Whether predictions come from measurements."""
        return self.bst is not None and len(self.inputs) > self.num_warmup_sample


def put_in_order(features: Any) -> npt.NDArray[np.float32]:
    """One program's features with its stores, and the buffers of each, in an order of their own.

    Args:
        features: A row for each store, (stores, features); one of zeros for a program that TVM cannot lower.

    Returns:
        The same numbers, float32 (stores, features).
    """
    rows = np.array(features, dtype=np.float32)
    buffers = rows[:, _FIRST:_END].reshape(len(rows), _BUFFERS, -1)
    columns = [*_LARGEST_FIRST, *range(buffers.shape[2])]
    order = np.lexsort([-buffers[:, :, column] for column in reversed(columns)], axis=-1)
    rows[:, _FIRST:_END] = np.take_along_axis(buffers, order[:, :, None], axis=1).reshape(len(rows), -1)
    return rows[np.lexsort(rows.T[::-1])]
