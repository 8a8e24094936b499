"""Which kernels of a model have a tuned record that can be used, and why others' cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_fuse_schedules
from tvm_fuse.core.reason import Code, Decision, Reason, applied, declined
from tvm_fuse.core.tuning.records import TunedRecord, load_records
from tvm_fuse.relay.kernel_functions import KernelFunction, find_kernels
from tvm_fuse.relay.record import PassRecord, record
from tvm_fuse.relay.tune_tasks import device_key_of, read_kernel_computation
from tvm_fuse.relay.tuned import TunedSchedule

__all__ = ["NOT_TUNED", "RULE", "SHIPPED_RECORDS", "TunedKernels", "apply_records", "describe_records"]

RULE = "tuned-record"

#: The records that come with tvm-fuse; the folder need not be there.
SHIPPED_RECORDS = Path(tvm_fuse_schedules.__file__).parent / "tuned"


@dataclass(frozen=True)
class TunedKernels:
    """What records say about the kernels of a module.

    Args:
        target: The target string that they are for.
        records: Those that are used.
        decisions: One for each kernel that has a record, here or of another device, and for damaged files.
    """

    target: str = ""
    records: tuple[TunedRecord, ...] = ()
    decisions: tuple[Decision, ...] = field(default=(), repr=False)

    def schedules_for(self, target: Any) -> Mapping[str, TunedSchedule]:
        """Digest -> schedule, for ``build_fused``; none for any other target."""
        used = self.records if str(target) == self.target else ()
        return {one.digest: TunedSchedule(one.workload_key, one.schedule) for one in used}


NOT_TUNED = TunedKernels()


def apply_records(module: Any, target: Any, root: Path, *, drafts: bool = False) -> TunedKernels:
    """Look for records of a module's kernels.

    Args:
        module: What ``FuseChains`` returned for the target.
        target: A ``tvm.target.Target``.
        root: Folder of records, with a folder for each device.
        drafts: Use those that nobody measured, too.

    Returns:
        The records of this device whose kernels compute what they were tuned for. A record of another
        device is not used: TVM would, since it compares kinds of targets only. ``last_report()`` has
        the decisions as ``TunedRecords``.
    """
    device = device_key_of(target)
    stored = load_records(root, device)
    if not (stored.records or stored.elsewhere or stored.damaged):
        return NOT_TUNED
    decisions = [
        declined(RULE, Path(file).name, Reason(Code.SCHEDULE_RECORD_DAMAGED, file, "a tuned record", problem))
        for file, problem in stored.damaged.items()
    ]
    used = []
    for kernel in find_kernels(module, target):
        found = stored.records.get(kernel.digest)
        others = stored.elsewhere.get(kernel.digest, ())
        if found is None and others:
            reason = Reason(Code.SCHEDULE_RECORD_DEVICE, kernel.name, device, ", ".join(others))
            decisions.append(declined(RULE, kernel.name, reason))
        if found is not None:
            decisions.append(_decide(kernel, found, target, drafts))
            used += [found] if decisions[-1].applied else []
    if not decisions:
        return NOT_TUNED
    count = sum(not decision.applied for decision in decisions)
    summary = f"{len(used)} tuned records of {device} are used, {count} are not"
    record(PassRecord("TunedRecords", summary, bool(used), tuple(decisions), tuple(used)))
    return TunedKernels(str(target), tuple(used), tuple(decisions))


def _decide(kernel: KernelFunction, found: TunedRecord, target: Any, drafts: bool) -> Decision:
    if not (found.measured or drafts):
        got = f"a draft, predicted {found.speedup:.2f} x as fast"
        reason = Reason(Code.SCHEDULE_RECORD_DRAFT, kernel.name, f"times measured on {found.device}", got)
        return declined(RULE, kernel.name, reason)
    computation = read_kernel_computation(kernel.function, target)
    key = "none" if computation is None else computation.workload_key
    if key != found.workload_key:
        reason = Reason(Code.SCHEDULE_RECORD_STALE, kernel.name, f"workload {found.workload_key}", key)
        return declined(RULE, kernel.name, reason)
    how = "when measured" if found.measured else "as predicted, not measured"
    return applied(RULE, kernel.name, f"record {found.digest}: {found.speedup:.2f} x as fast {how}")


def describe_records(tuned: TunedKernels) -> tuple[str, ...]:
    """What a report says of records: how many are used, and why others are not, a line for each reason."""
    lines = []
    if tuned.records:
        drafts = sum(not one.measured for one in tuned.records)
        what = f"{drafts} of them drafts that nobody measured; " if drafts else ""
        lines.append(
            f"{len(tuned.records)} kernels have tuned schedules ({what}records of {tuned.records[0].device})"
        )
    unused = [decision for decision in tuned.decisions if not decision.applied]
    counts = Counter(decision.reason.code for decision in unused if decision.reason is not None)
    for code, count in counts.items():
        example = next(one for one in unused if one.reason is not None and one.reason.code is code)
        lines.append(f"{example}{f' (and {count - 1} more)' if count > 1 else ''}")
    return tuple(lines)
