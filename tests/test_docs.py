"""The documents are inputs of tests: links lead somewhere, options exist, code and commands run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_fuse.cli.args import make_parser
from tvm_fuse.runner import __main__ as runner
from tvm_fuse.runner import candidate_job

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")]
)
README = ROOT / "README.md"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands():
    """Every line of a bash block, once."""
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.strip()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def parsers():
    """Name of each command -> its parser."""
    return next(iter(make_parser()._subparsers._group_actions)).choices


def documented_options(command):
    """The options in the first column of the table of a command, wherever it is."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    tables = re.findall(rf"^\| option of `{command}` \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    rows = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return {option for row in rows for option in re.findall(r"`(-[a-z-]+)", row)}


@pytest.mark.parametrize(
    "command", ["run", "plan", "explain", "ladder", "tune", "export", "fold", "manifest", "verify"]
)
def test_every_option_is_documented_and_there(command):
    options = {name for action in parsers()[command]._actions for name in action.option_strings}
    assert documented_options(f"tvm-fuse {command}") == options - {"-h", "--help"}


def test_every_command_is_named():
    readme = README.read_text(encoding="utf-8")
    assert [name for name in parsers() if f"tvm-fuse {name}" not in readme] == []
    assert {name for name, parser in parsers().items() if len(parser._actions) == 1} == {"doctor"}


def test_every_command_starts_with_a_known_program():
    assert {shlex.split(line)[0] for line in commands()} == {"python", "tvm-fuse"}


def test_the_options_of_the_runner_are_documented():
    parser = runner._make_parser()
    options = {name for action in parser._actions for name in action.option_strings}
    assert documented_options("python -m tvm_fuse.runner") == options - {"-h", "--help"}


def test_the_options_of_a_package_of_candidates_are_documented():
    options = {name for action in candidate_job._make_parser()._actions for name in action.option_strings}
    assert documented_options("python net-candidates/run.py") == options - {"-h", "--help"}


@pytest.mark.relay
@pytest.mark.cuda_codegen
@pytest.mark.slow
def test_commands_run(tmp_path):
    """In order, in one folder: later lines use what earlier ones wrote."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for line in commands():
        program, *arguments = shlex.split(line)
        start = [sys.executable] if program == "python" else [sys.executable, "-m", "tvm_fuse.cli"]
        done = subprocess.run([*start, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.relay
@pytest.mark.parametrize("code", blocks(README, "python"), ids=["passes"])
def test_readme_code_runs(code, tmp_path):
    (tmp_path / "code.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "code.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("True")


@pytest.mark.relay
def test_the_example_of_the_passes_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "passes.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 batch norms folded" in done.stdout
