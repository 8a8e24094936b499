"""Results of ``run.py`` as Markdown: ``python benchmarks/gpu/table.py RESULTS.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["render"]

_SLOWEST = 5  # kernels of a model


def render(document: Mapping[str, Any]) -> str:
    """The results as one page."""
    jobs = document["jobs"]
    checks, comparisons = (
        [job for job in jobs if job["kind"] == kind and "error" not in job] for kind in ("check", "compare")
    )
    device = checks[0]["device"] if checks else {"name": "no device", "arch": "?"}
    lines = [
        f"# {device['name']} ({device['arch']}), {document['date'][:10]}",
        "",
        f"`{document['command']}`, revision {document['revision'] or 'unknown'}",
    ]
    if document["is_emulated"]:
        lines += ["", "**Emulated on a CPU: nothing here is a measurement.**"]
    lines += _section(
        "Checks", ("bundle", "kernels", "outcome", "largest error of an operator"), map(_check, checks)
    )
    rows = [(job, row) for job in comparisons for row in job["rows"]]
    lines += _section(
        "Times", ("what", "form", "mode", "us", "of fused"), (_time(job, row) for job, row in rows)
    )
    timed = [job for job in jobs if job["kind"] == "kernels" and "error" not in job]
    lines += _section(
        "Slowest kernels", ("what", "kernel", "us"), (row for job in timed for row in _slowest(job))
    )
    lines += _section("Failed", ("job", "why"), map(_failure, (j for j in jobs if j["status"] != "passed")))
    lines += _section(
        "Not measured", ("job", "why"), ((j["name"], j["why"]) for j in document["not_measured"])
    )
    return "\n".join([*lines, "", *(f"- {note}" for note in document["notes"])]) + "\n"


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    table = [head, ["---"] * len(head), *rows]
    return ["", f"## {title}", "", *("| " + " | ".join(row) + " |" for row in table)]


def _check(job: Mapping[str, Any]) -> tuple[str, ...]:
    operators = job["operators"]
    outcome = "passed" if job["passed"] else f"FAILED, {operators['wrong_count']} operators wrong"
    return job["name"].replace("check ", ""), str(job["kernels"]), outcome, str(operators["largest_error"])


def _time(job: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    what = f"{job['subject']}, batch {job['batch']}"
    return what, row["name"], row["mode"], _spread(row.get("us")), _spread(row.get("ratio"))


def _slowest(job: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = sorted(job["rows"], key=lambda row: -(row["us"] or 0.0))[:_SLOWEST]
    what = f"{job['subject']}, batch {job['batch']}"
    return [(what, row["kernel"], "" if row["us"] is None else f"{row['us']:g}") for row in rows]


def _spread(quartiles: Mapping[str, float] | None) -> str:
    if quartiles is None:
        return ""
    return f"{quartiles['median']:g} ({quartiles['quartile_1']:g} to {quartiles['quartile_3']:g})"


def _failure(job: Mapping[str, Any]) -> tuple[str, str]:
    problems = "; ".join(f"{form}: {why}" for form, why in job.get("problems", {}).items())
    why = job.get("error") or problems or "see Checks"
    return job["name"], why.replace("\n", "; ").replace("|", "\\|")


if __name__ == "__main__":
    print(render(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
