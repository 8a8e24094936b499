"""A guard must be seen to fail: ``--require`` against tests that are skipped, or absent."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = "import pytest\n@pytest.mark.relay\ndef test_it():\n    pytest.skip('no reason')\n"
PASSED = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pass\n"
NEEDS_TORCH = "import pytest\n@pytest.mark.relay\n@pytest.mark.torch\ndef test_it():\n    pass\n"
UNMARKED = "def test_it():\n    pass\n"
WHOLE_FILE = "import pytest\npytest.skip('no reason', allow_module_level=True)\n"
WORKERS = ("-n", "2")


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest on one test file beside a conftest that finds one group missing, or none."""

    def run(text, *args, missing=""):
        conftest = (ROOT / "tests" / "conftest.py").read_text()
        says = f'\n\ndef missing_for(group):\n    return "it" if group == "{missing}" else ""\n'
        (tmp_path / "conftest.py").write_text(conftest + says)
        (tmp_path / "test_it.py").write_text(text)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
        ]
        return subprocess.run(
            [*command, "--rootdir", str(tmp_path), str(tmp_path), *args],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("text", "args", "code"),
    [
        pytest.param(SKIPPED, (), 0, id="a skip is fine"),
        pytest.param(SKIPPED, ("--require", "relay"), 1, id="a skip of the required group fails"),
        pytest.param(
            SKIPPED + UNMARKED.replace("it", "b"), ("--require", "gpu"), 1, id="required group is empty"
        ),
        pytest.param(PASSED, ("--require", "gpu"), 0, id="required and passed"),
        pytest.param(WHOLE_FILE + UNMARKED, ("--require", "relay"), 2, id="a whole file skipped"),
        pytest.param(UNMARKED, ("--require", "relya"), 4, id="unknown group"),
        pytest.param(
            SKIPPED, (*WORKERS, "--require", "relay"), 1, id="a skip of the required group fails, in a worker"
        ),
        pytest.param(
            UNMARKED, (*WORKERS, "--require", "gpu"), 1, id="required group is empty, in all workers"
        ),
        pytest.param(PASSED, (*WORKERS, "--require", "gpu"), 0, id="required and passed, in a worker"),
    ],
)
def test_require(run_pytest, text, args, code):
    done = run_pytest(text, *args)
    assert done.returncode == code, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), WORKERS], ids=["one process", "workers"])
def test_summary_counts_each_group(run_pytest, workers):
    text = SKIPPED + UNMARKED.replace("it", "other")
    lines = run_pytest(text, *workers).stdout.splitlines()
    assert "relay          0 passed, 0 failed, 1 skipped" in lines
    assert "no TVM needed  1 passed, 0 failed, 0 skipped" in lines


def test_what_lacks_another_group_may_skip(run_pytest):
    done = run_pytest(NEEDS_TORCH, "--require", "relay", missing="torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "relay          0 passed, 0 failed, 1 skipped" in done.stdout.splitlines()
    assert run_pytest(NEEDS_TORCH, "--require", "relay,torch", missing="torch").returncode == 1
