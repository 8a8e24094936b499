"""What ``--fuse`` and its neighbours say, and the gates ``--expect-fused`` and ``--expect-plan``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_fuse.cli.options import to_mapping
from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.plan_file import PlanFile, load
from tvm_fuse.core.plan_options import FUSE_MODES, PlanOptions
from tvm_fuse.core.reason import Decision
from tvm_fuse.epsilon_config import read_epsilon_config

__all__ = [
    "Gates",
    "Steering",
    "check_folder",
    "check_gates",
    "check_writable",
    "read_epsilons",
    "read_records",
    "read_steering",
]


@dataclass(frozen=True)
class Gates:
    """What is expected; None expects nothing."""

    fused: int | None
    plan: PlanFile | None
    plan_name: str


@dataclass(frozen=True)
class Steering:
    """What the command line says about the plan.

    Args:
        plan: How to plan.
        file: A plan to carry out instead; None makes one.
        save: Where to write it; None does not.
        gates: What is expected.
    """

    plan: PlanOptions
    file: PlanFile | None
    save: Path | None
    gates: Gates

    @property
    def options(self) -> dict[str, Any]:
        """The same for ``FuseOptions``."""
        return {"plan": self.plan, "plan_file": self.file, "save_plan": self.save}


def read_steering(args: argparse.Namespace) -> Steering:
    """Read the options, and the plan files that they name, before the work begins.

    Raises:
        UsageError: A file cannot be read or written, or ``--fuse`` is neither a mode nor a file.
        ModelError: A file is no fusion plan.
    """
    file = None
    if args.fuse not in FUSE_MODES:
        if not Path(args.fuse).exists():
            wanted = ", ".join(FUSE_MODES)
            raise UsageError(f"--fuse {args.fuse}: wanted {wanted} or a plan file, which is not there")
        file = load(Path(args.fuse))
        if args.only or args.skip or args.max_ops is not None:
            raise UsageError(
                f"--fuse {args.fuse} says what to fuse: wanted no --only, --skip or --max-ops beside it",
                "edit the plan file, or leave one of them out",
            )
    plan = PlanOptions(
        fuse="all" if file else args.fuse,
        only=tuple(args.only),
        skip=tuple(args.skip),
        max_ops=args.max_ops,
    )
    if args.save_plan is not None:
        check_writable(args.save_plan, "--save-plan")
    wanted_plan = getattr(args, "expect_plan", None)
    gates = Gates(
        getattr(args, "expect_fused", None),
        None if wanted_plan is None else load(wanted_plan),
        "" if wanted_plan is None else wanted_plan.name,
    )
    return Steering(plan, file, args.save_plan, gates)


def read_epsilons(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about epsilons, for the options of a job."""
    config = read_epsilon_config(args.epsilon_config) if args.epsilon_config else EpsilonConfig()
    epsilon = to_mapping(args.epsilon, "--epsilon")
    return {"epsilon": epsilon, "epsilon_config": config, "align_epsilon": args.align_epsilon}


def read_records(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about tuned records, for the options of a job.

    Raises:
        UsageError: The folder is not there, or records are both asked for and forbidden.
    """
    if args.no_records:
        if args.records is not None:
            raise UsageError("--records and --no-records contradict each other: give one of them")
        if args.drafts:
            raise UsageError("--drafts and --no-records contradict each other: give one of them")
        return {"records": None}
    if args.records is None:
        return {"drafts": args.drafts}
    if not args.records.is_dir():
        raise UsageError(f"--records {args.records}: wanted a folder, which is not there")
    return {"records": args.records, "drafts": args.drafts}


def check_writable(file: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work begins.

    Raises:
        UsageError: It is a folder, or its folder is not there.
    """
    if file.is_dir():
        raise UsageError(f"{option} {file}: wanted a file, got a folder")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: the folder {file.absolute().parent} is not there")


def check_folder(folder: Path, option: str = "--output") -> None:
    """Refuse a folder that cannot be made or written, before an hour of work is lost."""
    place = folder.absolute()
    try:
        existing = next(path for path in (place, *place.parents) if path.exists())
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}") from error
    if not existing.is_dir():
        raise UsageError(f"{option} {folder}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: {existing} cannot be written")


def check_gates(steering: Steering, fused: int, not_fused: Iterable[Decision], plan: PlanFile) -> None:
    """Compare a plan with what is expected of it.

    Args:
        steering: The options.
        fused: Anchors that are fused with something.
        not_fused: Decisions about the others.
        plan: The plan.

    Raises:
        ExpectationFailed: Fewer are fused, or the plan is another one.
    """
    from tvm_fuse.planning import check_fused, check_same_plan

    gates = steering.gates
    if gates.fused is not None:
        check_fused(fused, not_fused, gates.fused)
    if gates.plan is not None:
        check_same_plan(plan, gates.plan, gates.plan_name)
