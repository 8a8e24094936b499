"""A fusion plan as a file: saved, read by people, edited, compared.

JSON with sorted keys, the same bytes for the same plan. It holds the structure of the graph it was made for,
one line a node, so that a plan for another graph says which operator differs; weights and names of
operators do not count. ``replay.py`` makes a plan of it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.folders import write_file
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.group import FusionGroup
from tvm_fuse.core.plan import FusionPlan
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Reason

__all__ = [
    "PlanDiff",
    "PlanFile",
    "PlannedGroup",
    "PlannedNode",
    "describe_graph",
    "diff",
    "from_json",
    "load",
    "make_plan_file",
    "save",
    "to_json",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/fusion-plan", "version": 2}

_HINT = "make it again with this version"


@dataclass(frozen=True)
class PlannedNode:
    """An operator of a group: its id in the graph, and what it is, for people."""

    id: int
    operator: str
    name: str


@dataclass(frozen=True)
class PlannedGroup:
    """A group as the file has it; fields as in ``FusionGroup``."""

    id: str
    name: str
    anchor: int | None
    nodes: tuple[PlannedNode, ...]
    result: int
    prologue: tuple[int, ...]
    absorbed: tuple[int, ...]
    also: tuple[int, ...]
    recomputed: tuple[int, ...]
    end: Reason | None

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of its operators."""
        return tuple(node.id for node in self.nodes)

    def __str__(self) -> str:
        operators = ", ".join(f"{node.id} {node.operator}" for node in self.nodes)
        return f"{self.id} {self.name} ({operators})"


@dataclass(frozen=True)
class PlanFile:
    """What the file holds.

    Args:
        tool: Name and version of what planned.
        target: The target string it was planned for.
        kind: Its kind, a key of ``CAPABILITIES``.
        graph: The graph, one line a node, and one for the outputs.
        fuse, only, skip, max_ops: The user's options.
        groups: The kernels.
        alone: Ids of operators that the user left out: TVM must not fuse them either.
    """

    tool: str
    target: str
    kind: str
    graph: tuple[str, ...]
    fuse: str
    only: tuple[str, ...]
    skip: tuple[str, ...]
    max_ops: int | None
    groups: tuple[PlannedGroup, ...]
    alone: tuple[int, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the graph's lines."""
        return hashlib.sha256("\n".join(self.graph).encode()).hexdigest()


def describe_graph(graph: Graph) -> tuple[str, ...]:
    """The structure of a graph: operators, attributes, shapes, dtypes and who reads whom.

    Args:
        graph: The graph.

    Returns:
        One line a node, in order, and one for the outputs. Names and weights are not in it.
    """
    lines = [
        f"{node.op} ({', '.join(map(str, node.inputs))}) -> {', '.join(map(str, node.outputs))}"
        + ("" if node.attrs is None else f" {node.attrs}")
        for node in graph.nodes
    ]
    return (*lines, f"returns {', '.join(map(str, graph.outputs))}")


def make_plan_file(graph: Graph, plan: FusionPlan, target: str, options: PlanOptions, tool: str) -> PlanFile:
    """What to save of a plan.

    Args:
        graph: The graph it was made for.
        plan: The plan.
        target: The target string.
        options: What ``plan_chains`` got.
        tool: Name and version of the tool, such as ``tvm-fuse 0.1.0``.
    """
    return PlanFile(
        tool,
        target,
        options.target,
        describe_graph(graph),
        options.fuse,
        options.only,
        options.skip,
        options.max_ops,
        tuple(_planned(graph, group) for group in plan.groups),
        tuple(group.result for group in plan.alone),
    )


def _planned(graph: Graph, group: FusionGroup) -> PlannedGroup:
    nodes = (graph.nodes[node] for node in group.nodes)
    members = tuple(PlannedNode(node.id, node.op, node.name) for node in nodes)
    return PlannedGroup(
        group.id,
        group.name,
        group.anchor,
        members,
        group.result,
        group.prologue,
        group.absorbed,
        group.also,
        group.recomputed,
        group.end,
    )


# --- JSON -----------------------------------------------------------------------------------------


def to_json(file: PlanFile) -> str:
    """The file's text."""
    document = {
        "schema": SCHEMA,
        "tool": file.tool,
        "target": file.target,
        "kind": file.kind,
        "graph": {"sha256": file.digest, "nodes": file.graph},
        "options": {"fuse": file.fuse, "only": file.only, "skip": file.skip, "max_ops": file.max_ops},
        "groups": [_group_to_json(group) for group in file.groups],
        "alone": file.alone,
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _group_to_json(group: PlannedGroup) -> dict[str, Any]:
    end = group.end
    return {
        "id": group.id,
        "name": group.name,
        "anchor": group.anchor,
        "nodes": [{"id": node.id, "operator": node.operator, "name": node.name} for node in group.nodes],
        "result": group.result,
        "prologue": group.prologue,
        "absorbed": group.absorbed,
        "also": group.also,
        "recomputed": group.recomputed,
        "end": end and {"code": end.code.value, "at": end.at, "wanted": end.wanted, "got": end.got},
    }


def from_json(text: str, where: str = "the plan") -> PlanFile:
    """Read the text of a plan file.

    Args:
        text: JSON.
        where: Name of the file, for errors.

    Raises:
        ModelError: It is no plan, of a schema that is not known, or damaged.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where}: wanted a fusion plan, got no JSON: {error}", _HINT) from error
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema != SCHEMA:
        raise ModelError(f"{where}: wanted a fusion plan with schema {SCHEMA}, got {schema}", _HINT)
    try:
        file = _read(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: the fusion plan is damaged: {_say(error)}", _HINT) from error
    if file.digest != document["graph"].get("sha256"):
        raise ModelError(
            f"{where}: the graph of the fusion plan was changed: wanted SHA-256 "
            f"{document['graph'].get('sha256')}, got {file.digest}",
            "edit groups, not the graph",
        )
    return file


def _say(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _read(document: Mapping[str, Any]) -> PlanFile:
    options = document["options"]
    return PlanFile(
        str(document["tool"]),
        str(document["target"]),
        str(document["kind"]),
        _texts(document["graph"]["nodes"]),
        str(options["fuse"]),
        _texts(options["only"]),
        _texts(options["skip"]),
        None if options["max_ops"] is None else _id(options["max_ops"]),
        tuple(_read_group(group) for group in document["groups"]),
        _ids(document["alone"]),
    )


def _read_group(group: Mapping[str, Any]) -> PlannedGroup:
    end = group["end"]
    return PlannedGroup(
        str(group["id"]),
        str(group["name"]),
        None if group["anchor"] is None else _id(group["anchor"]),
        tuple(
            PlannedNode(_id(node["id"]), str(node["operator"]), str(node["name"])) for node in group["nodes"]
        ),
        _id(group["result"]),
        _ids(group["prologue"]),
        _ids(group["absorbed"]),
        _ids(group["also"]),
        _ids(group["recomputed"]),
        end and Reason(Code(end["code"]), str(end["at"]), str(end["wanted"]), str(end["got"])),
    )


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"wanted a list, got {values!r}")
    return tuple(map(str, values))


def _ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"wanted a list of numbers, got {values!r}")
    return tuple(map(_id, values))


def _id(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"wanted the number of a node, got {value!r}")
    return value


def save(path: Path, file: PlanFile) -> None:
    """Write a plan file; one that is there stays whole until the new one is complete.

    Raises:
        UsageError: The file cannot be written.
    """
    write_file(path, to_json(file).encode())


def load(path: Path) -> PlanFile:
    """Read a plan file.

    Raises:
        UsageError: The file cannot be read.
        ModelError: As ``from_json``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    return from_json(text, path.name)


# --- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanDiff:
    """How two plans differ; empty tuples where they do not.

    Args:
        context: What is not the same about graph, target or options.
        removed: Groups of the first plan whose operators are no group of the second.
        added: Groups of the second plan whose operators are no group of the first.
    """

    context: tuple[str, ...]
    removed: tuple[PlannedGroup, ...]
    added: tuple[PlannedGroup, ...]

    @property
    def is_empty(self) -> bool:
        """Whether both plans make the same kernels of the same graph for the same target."""
        return not (self.context or self.removed or self.added)

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: ``- group`` and ``+ group``."""
        return (
            *self.context,
            *(f"- {group}" for group in self.removed),
            *(f"+ {group}" for group in self.added),
        )


def diff(left: PlanFile, right: PlanFile) -> PlanDiff:
    """Compare two plans; names, ids and reasons do not count, the tool's version neither."""
    context = [
        f"{what}: {old} became {new}"
        for what, old, new in (
            ("target", left.target, right.target),
            ("graph", left.digest[:12], right.digest[:12]),
            ("left alone", list(left.alone), list(right.alone)),
        )
        if old != new
    ]
    return PlanDiff(tuple(context), _without(left.groups, right.groups), _without(right.groups, left.groups))


def _without(groups: Iterable[PlannedGroup], others: Iterable[PlannedGroup]) -> tuple[PlannedGroup, ...]:
    kernels = {_kernel(group) for group in others}
    return tuple(group for group in groups if _kernel(group) not in kernels)


def _kernel(group: PlannedGroup) -> tuple[Any, ...]:
    results = (*group.also, group.result)
    return group.anchor, frozenset(group.members), results, group.absorbed, group.recomputed
