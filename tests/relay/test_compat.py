"""Which TVM is found, and what is said when there is none that will do.

Each case runs in a fresh Python whose first folder on sys.path holds made-up packages, so it
does not matter which TVM this environment has.
"""

import importlib
import logging
import os
import subprocess
import sys

import pytest

from tvm_fuse.relay import compat

REPORT = """
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.relay.compat import find_tvm, load_tvm
try:
    base = find_tvm()
    print(base.origin, base.version, base.path)
    {then}
except MissingDependency as error:
    print("MISSING", error)
"""
RELAX_ONLY = {
    "tvm/__init__.py": "",
    "tvm/libinfo.py": "__version__ = '0.25.0'\n",
    "tvm/relax/__init__.py": "",
}
WITH_RELAY = {
    "tvm/__init__.py": "from ._ffi.libinfo import __version__\n",
    "tvm/_ffi/__init__.py": "",
    "tvm/_ffi/libinfo.py": '__version__ = "0.16.0"\n',
    "tvm/relay/__init__.py": "",
}
NO_EMBEDDED = {"bitblas/__init__.py": "raise SystemExit('bitblas must not be imported')"}
EMBEDDED = {
    **NO_EMBEDDED,
    **{f"bitblas/3rdparty/tvm/python/{name}": text for name, text in WITH_RELAY.items()},
}


@pytest.fixture
def run(tmp_path):
    """Writes packages, runs code in a fresh Python that sees them first, returns what it printed."""

    def run_with(packages, code, **environment):
        for name, text in packages.items():
            file = tmp_path / "site" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "cwd").mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(tmp_path / "site"), **environment},
            cwd=tmp_path / "cwd",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_with


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        pytest.param({**WITH_RELAY, **EMBEDDED}, "installed 0.16.0", id="installed before embedded"),
        pytest.param({**WITH_RELAY, **NO_EMBEDDED}, "installed 0.16.0", id="installed alone"),
        pytest.param(
            {**RELAX_ONLY, **EMBEDDED}, "embedded 0.16.0", id="embedded when the installed has no Relay"
        ),
        pytest.param(
            {"tvm/notes.txt": "", **EMBEDDED}, "embedded 0.16.0", id="a folder called tvm is no package"
        ),
    ],
)
def test_find_tvm_prefers(run, packages, expected):
    assert run(packages, REPORT.format(then="")).startswith(expected)


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        pytest.param({"tvm/notes.txt": "", **NO_EMBEDDED}, ("no TVM is installed",), id="none"),
        pytest.param({**RELAX_ONLY, **NO_EMBEDDED}, ("no Relay", "0.25.0"), id="Relax only"),
    ],
)
def test_find_tvm_says_what_is_missing(run, packages, words):
    text = run(packages, REPORT.format(then=""))
    assert text.startswith("MISSING")
    for word in (*words, 'pip install "tvm-fuse[relay]"'):
        assert word in text


def test_wrong_tvm_already_imported(run):
    text = run({**RELAX_ONLY, **EMBEDDED}, "import tvm\n" + REPORT.format(then=""))
    assert text.startswith("MISSING")
    assert "already imported" in text


def test_load_tvm_is_idempotent_and_quiet(run):
    code = REPORT.format(
        then="""
    import os, sys
    print(load_tvm() is load_tvm() is sys.modules["tvm"], os.environ["TOPHUB_LOCATION"])
"""
    )
    assert "True NONE" in run({**WITH_RELAY, **NO_EMBEDDED}, code)
    assert "True /logs" in run({**WITH_RELAY, **NO_EMBEDDED}, code, TOPHUB_LOCATION="/logs")


def test_load_tvm_leaves_the_working_directory_alone(run, tmp_path):
    packages = {**WITH_RELAY, "tvm/__init__.py": "import os; os.mkdir('.pkl_memoize_py3')", **NO_EMBEDDED}
    code = REPORT.format(then="load_tvm(); import os; print(os.getcwd())")
    assert run(packages, code).endswith(f"{tmp_path / 'cwd'}\n")
    assert list((tmp_path / "cwd").iterdir()) == []


def test_load_tvm_that_fails_to_import(run):
    packages = {**WITH_RELAY, "tvm/__init__.py": "import tvm._ffi, no_such_module", **NO_EMBEDDED}
    code = REPORT.format(then="load_tvm()") + "import sys; print([m for m in sys.modules if 'tvm.' in m])"
    text = run(packages, code)
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'" in text
    assert text.endswith("[]\n")  # a second try starts afresh


def test_embedded_tvm_refuses_numpy_2(run):
    metadata = {"numpy-2.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n"}
    text = run({"tvm/notes.txt": "", **EMBEDDED, **metadata}, REPORT.format(then="load_tvm()"))
    assert "MISSING the embedded TVM 0.17 needs numpy<2; found numpy 2.1.0" in text


def test_onnx_without_mapping_gets_one(run):
    onnx = {
        "onnx/__init__.py": "",
        "onnx/helper.py": "get_all_tensor_dtypes = lambda: [1]\n"
        "tensor_dtype_to_np_dtype = {1: 'float32'}.get\n",
    }
    code = "load_tvm(); from onnx.mapping import TENSOR_TYPE_TO_NP_TYPE as table; print(table)"
    assert "{1: 'float32'}" in run({**WITH_RELAY, **NO_EMBEDDED, **onnx}, REPORT.format(then=code))


def test_onnx_with_mapping_keeps_it(run):
    onnx = {"onnx/__init__.py": "", "onnx/mapping.py": "TENSOR_TYPE_TO_NP_TYPE = 'its own'"}
    code = "load_tvm(); from onnx.mapping import TENSOR_TYPE_TO_NP_TYPE as table; print(table)"
    assert "its own" in run({**WITH_RELAY, **NO_EMBEDDED, **onnx}, REPORT.format(then=code))


def test_worker_environment_reaches_children_and_is_undone(run):
    code = REPORT.format(
        then="""
    import os, subprocess, sys
    from tvm_fuse.relay.compat import worker_environment
    before = dict(os.environ)
    with worker_environment():
        subprocess.run([sys.executable, "-c", "import tvm; print('child', tvm.__version__)"], check=True)
    ours = {name: os.environ[name] for name in ("TOPHUB_LOCATION", "TVM_NUM_THREADS", "PATH")}
    print(dict(os.environ) == {**before, **ours})
"""
    )
    text = run({**WITH_RELAY, **NO_EMBEDDED}, code)
    assert "child 0.16.0" in text
    assert text.endswith("True\n")


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("Cannot find config for target=cuda, workload=(1,)", False),
        ("Cannot find tuned schedules for target=llvm", False),
        ("One or more operators have not been tuned. Please", False),
        ("Failed to build", True),
    ],
)
def test_untuned_warnings_are_dropped(message, passes):
    record = logging.LogRecord("autotvm", logging.WARNING, "", 0, message, None, None)
    assert compat._is_not_untuned_warning(record) is passes


@pytest.mark.relay
def test_real_tvm_needs_no_environment(tmp_path):
    code = (
        "from tvm_fuse.relay.compat import find_tvm, load_tvm, require_relay\n"
        "tvm = load_tvm()\n"
        "from tvm import auto_scheduler, relay\n"
        "assert require_relay() is relay\n"
        "assert find_tvm().path.samefile(tvm.__path__[0])\n"
        "x = relay.var('x', shape=(2,))\n"
        "print(tvm.IRModule.from_expr(relay.nn.relu(x)), tvm.cuda(0).exist)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nn.relu" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.relay
def test_real_tvm_in_a_worker():
    tvm = compat.load_tvm()
    before = dict(os.environ)
    with compat.worker_environment():
        worker = importlib.import_module("tvm.contrib.popen_pool").PopenWorker()
        worker.send(str.upper, ["loaded"], timeout=60)
        assert worker.recv() == "LOADED"
        worker.kill()
    assert dict(os.environ) == before
    assert tvm is compat.load_tvm()
