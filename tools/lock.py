"""Writes requirements.lock beside each requirements.in: exact versions, with the hashes of PyPI's wheels.

For each requirement and each supported Python it takes the newest release with a wheel for
Linux x86-64; where the Pythons differ, one line each with an environment marker. There is no
dependency resolution: requirements.in names every package, and the tests are the proof.

Usage: python tools/lock.py [FOLDER ...]    (the root and benchmarks if none; needs `packaging`, network)
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parent.parent
INDEX = PyPI.simple_url  # the one that pip asks by default, whatever this machine is told to use
PYTHONS = ("3.9", "3.10", "3.11", "3.12")
GLIBC_MINOR_MAX = 28  # manylinux_2_28, the oldest system that all wheels of the lock share


def platform_fits(platform: str) -> bool:
    """True for `any` and for Linux x86-64 with an old enough glibc."""
    modern = re.fullmatch(r"manylinux_2_(\d+)_x86_64", platform)
    if modern:
        return int(modern.group(1)) <= GLIBC_MINOR_MAX
    return platform in {"any", "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"}


def interpreter_fits(interpreter: str, abi: str, python: str) -> bool:
    """True when a wheel's Python and ABI tags suit this CPython."""
    minor = int(python.split(".")[1])
    if interpreter == "py3":
        return True
    found = re.fullmatch(r"cp3(\d+)", interpreter)
    if not found:
        return False
    if abi == "abi3":
        return int(found.group(1)) <= minor
    return int(found.group(1)) == minor and abi in {interpreter, "none"}


def wheel_fits(file: dict, python: str) -> bool:
    """True when one file of the index can be installed on this CPython."""
    _, _, _, tags = parse_wheel_filename(file["filename"])
    return Version(f"{python}.9") in SpecifierSet(file.get("requires-python") or "") and any(
        platform_fits(tag.platform) and interpreter_fits(tag.interpreter, tag.abi, python) for tag in tags
    )


def load_wheels(name: str) -> dict[Version, list[dict]]:
    """Asks the index for a project's wheels that were not withdrawn, by version."""
    request = urllib.request.Request(
        f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    wheels: dict[Version, list[dict]] = {}
    for file in files:
        if file.get("yanked") or not file["filename"].endswith(".whl"):
            continue
        try:
            version = parse_wheel_filename(file["filename"])[1]
        except InvalidWheelFilename:  # only very old releases have such names
            continue
        wheels.setdefault(version, []).append(file)
    return wheels


def lock_requirement(line: str) -> list[str]:
    """Turns one line of requirements.in into lines of the lock."""
    text, _, only = (part.strip() for part in line.partition("# only:"))
    requirement = Requirement(text)
    pythons = [
        python
        for python in PYTHONS
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    ]
    wheels = {
        version: [file for file in files if only in file["filename"]]
        for version, files in load_wheels(requirement.name).items()
        if requirement.specifier.contains(version)
    }
    chosen: dict[Version, list[str]] = {}
    for python in pythons:
        fitting = [
            version for version, files in wheels.items() if any(wheel_fits(file, python) for file in files)
        ]
        if not fitting:
            raise SystemExit(f"{text}: no wheel for Python {python}")
        chosen.setdefault(max(fitting), []).append(python)

    lines = []
    for version, users in sorted(chosen.items(), key=lambda item: PYTHONS.index(item[1][0])):
        hashes = sorted(
            file["hashes"]["sha256"]
            for file in wheels[version]
            if any(wheel_fits(file, python) for python in users)
        )
        marker = "" if users == list(PYTHONS) else "; " + marker_for(users)
        lines.append(
            f"{requirement.name}=={version}{marker} \\\n"
            + " \\\n".join(f"    --hash=sha256:{digest}" for digest in hashes)
        )
    return lines


def marker_for(pythons: list[str]) -> str:
    """The shortest readable marker that is true for just these Pythons."""
    first, last = PYTHONS.index(pythons[0]), PYTHONS.index(pythons[-1])
    if pythons != list(PYTHONS[first : last + 1]):
        return " or ".join(f'python_version == "{python}"' for python in pythons)
    parts = []
    if first > 0:
        parts.append(f'python_version >= "{pythons[0]}"')
    if last < len(PYTHONS) - 1:
        parts.append(f'python_version < "{PYTHONS[last + 1]}"')
    return " and ".join(parts)


def main() -> None:
    """Reads each requirements.in and writes requirements.lock beside it."""
    for folder in map(Path, sys.argv[1:] or (ROOT, ROOT / "benchmarks")):
        lines = ["# Written by tools/lock.py from requirements.in; do not edit.", ""]
        for line in (folder / "requirements.in").read_text().splitlines():
            if line and not line.startswith("#"):
                lines += lock_requirement(line)
        (folder / "requirements.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
