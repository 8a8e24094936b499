"""``main``: errors become exit codes and one message on standard error. Needs no TVM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tvm_fuse import __version__, cli
from tvm_fuse.cli import commands
from tvm_fuse.core import errors
from tvm_fuse.doctor import Check, Status

#: Runs the command with every import of TVM, NumPy and onnx refused.
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder
class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tvm", "bitblas", "numpy", "onnx"} or name.startswith("tvm_fuse.relay"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from tvm_fuse.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def doctor_does(monkeypatch):
    """``doctor_does(action)`` makes ``tvm-fuse doctor`` call it."""
    return lambda action: monkeypatch.setattr(commands, "run_doctor", lambda args: action())


def throw(error):
    raise error


def run_process(
    *argv, code="from tvm_fuse.cli import main; import sys; sys.exit(main(sys.argv[1:]))", **options
):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv], text=True, stderr=subprocess.PIPE, env=env, **options
    )


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ParityFailed("what", "hint"), 1),
        (errors.UsageError("what", "hint"), 2),
        (errors.ModelError("what", "hint"), 3),
        (errors.MissingDependency("what", "hint"), 4),
        (errors.ToolFailed("what", "hint"), 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_is_its_exit_code_and_one_message(doctor_does, capsys, error, code):
    doctor_does(lambda: throw(error))
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr() == ("", "error: what\nhint: hint\n")


@pytest.mark.parametrize(
    "error", [errors.InternalError("broken"), ZeroDivisionError("broken"), OSError("broken")]
)
def test_a_bug_is_70_without_a_traceback(doctor_does, monkeypatch, capsys, error):
    monkeypatch.delenv("TVM_FUSE_TRACEBACK", raising=False)
    doctor_does(lambda: throw(error))
    assert cli.main(["doctor"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert type(error).__name__ in err
    assert "broken" in err
    assert "Traceback" not in err


def test_a_bug_shows_its_traceback_on_demand(doctor_does, monkeypatch, capsys):
    monkeypatch.setenv("TVM_FUSE_TRACEBACK", "1")
    doctor_does(lambda: throw(ZeroDivisionError()))
    assert cli.main(["doctor"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(doctor_does, capsys):
    doctor_does(lambda: throw(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("code", [0, 1, 4])
def test_the_code_of_the_command_is_returned(doctor_does, code):
    doctor_does(lambda: code)
    assert cli.main(["doctor"]) == code


# --- standard output that cannot be written ------------------------------------------------------


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_a_reader_that_goes_away_is_no_error(argv):
    reader, writer = os.pipe()
    os.close(reader)
    process = run_process(*argv, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["in the buffer", "larger than the buffer"])
def test_a_reader_that_goes_away_from_a_command_is_no_error(size):
    code = (
        "import sys; from tvm_fuse.cli import commands, main\n"
        f"commands.run_doctor = lambda args: print('x' * {size}) or 0\n"
        "sys.exit(main(['doctor']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    process = run_process(code=code, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_an_error():
    code = (
        "import sys; from tvm_fuse.cli import commands, main\n"
        "commands.run_doctor = lambda args: print('x') or 0\n"
        "sys.exit(main(['doctor']))"
    )
    with open("/dev/full", "w") as full:
        process = run_process(code=code, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert err.startswith("error: ")
    assert "Traceback" not in err


# --- help, version, usage ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["-h"], "doctor"), (["--help"], "run"), (["run", "-h"], "--align-epsilon"),
        (["doctor", "-h"], "doctor"), (["--version"], __version__),
    ],
    ids=str,
)  # fmt: skip
def test_help_and_version_need_nothing_installed(argv, part):
    process = run_process(*argv, code=BLOCKED, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert part in out


def test_help_lists_every_exit_code(capsys):
    codes = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")}
    for argv in (["-h"], ["run", "-h"]):
        with pytest.raises(SystemExit):
            cli.main(argv)
        text = capsys.readouterr().out.replace("\n", " ")
        assert all(f" {code} " in text for code in codes)


def test_the_module_is_the_command():
    for module in ("tvm_fuse.cli",):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == f"tvm-fuse {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["run"], ["run", "a.onnx", "b.onnx"], ["run", "a.onnx", "--nonsense"]], ids=str
)
def test_wrong_usage_is_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: tvm-fuse" in err


# --- doctor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "code"),
    [([Status.OK], 0), ([Status.OK, Status.OPTIONAL], 0), ([Status.MISSING, Status.OK], 4)],
    ids=["all there", "optional absent", "needed absent"],
)
def test_doctor_exits_with_4_when_something_needed_is_missing(monkeypatch, capsys, statuses, code):
    checks = tuple(Check(f"thing{i}", status, "found", "use", "advice") for i, status in enumerate(statuses))
    monkeypatch.setattr("tvm_fuse.doctor.diagnose", lambda: checks)
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert all(check.name in out for check in checks)
    assert err == ""


def test_run_without_tvm_is_4(tmp_path):
    process = run_process(
        "run", str(tmp_path / "m.onnx"), stdout=subprocess.PIPE,
        code="import sys; from tvm_fuse.relay import compat; from tvm_fuse.cli import main\n"
        "compat._find_installed = compat._find_embedded = lambda: None\n"
        "sys.exit(main(sys.argv[1:]))",
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, "")
    assert err.startswith("error: ")
    assert "tvm-fuse[relay]" in err
    assert "Traceback" not in err
