"""Who may import whom: over the syntax trees, and by importing with ``tvm`` blocked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tvm_fuse"
STDLIB = frozenset(sys.stdlib_module_names) if sys.version_info >= (3, 10) else None

#: The modules that find and load TVM; all others get it from ``tvm_fuse.relay.base``.
TVM_LOADERS = ("tvm_fuse.relay.compat", "tvm_fuse.relay.base")
#: Who may import TVM at all. A new front end stands beside ``tvm_fuse.relay``.
TVM_USERS = ("tvm_fuse.relay", "tvm_fuse.transform", "schedules")
#: Importing these loads TVM, or may.
FRONT_END = ("tvm_fuse.relay", "tvm_fuse.transform", "tvm_fuse.pipeline")
TVM_FREE = ("tvm_fuse.core", "tvm_fuse.onnx", "tvm_fuse.cuda", "tvm_fuse.runner")
THIRD_PARTY = frozenset(
    {"numpy", "onnx", "tvm", "bitblas", "scipy", "torch", "onnxruntime", "google", "ml_dtypes", "yaml"}
)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(source: str, module: str, is_package: bool = False) -> list[str]:
    """All names that a module imports anywhere in it, ``from a import b`` as ``a.b``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, node.module] if node.module else kept)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def breaches(module: str, imported: str) -> str:
    """The rule that an import breaks, or an empty string."""
    top = imported.split(".")[0]
    if within(imported, "tvm_fuse.cli") and not within(module, "tvm_fuse.cli", "tvm_fuse.__main__"):
        return "nobody imports the command line"
    if within(module, "tvm_fuse.core"):
        if top == "tvm_fuse" and not within(imported, "tvm_fuse.core"):
            return "core imports core only"
        if top in THIRD_PARTY - {"numpy"} or not _is_stdlib(top, "numpy", "tvm_fuse"):
            return "core needs NumPy and the standard library only"
    if within(module, *TVM_FREE) and (top == "tvm" or within(imported, *FRONT_END)):
        return "this package knows no TVM"
    if within(module, "tvm_fuse.cuda", "tvm_fuse.runner") and (
        top in THIRD_PARTY - {"numpy"} or within(imported, "tvm_fuse.onnx")
    ):
        return "CUDA kernels need NumPy and the standard library only"
    if top == "tvm" and not within(module, *TVM_LOADERS) and not within(module, "schedules"):
        return "TVM comes from tvm_fuse.relay.base"
    if within(imported, "tvm_fuse.relay.base") and not within(module, *TVM_USERS):
        return "only the front end, transform.py and the schedules use TVM"
    return ""


def _is_stdlib(top: str, *also: str) -> bool:
    return top in also or STDLIB is None or top in STDLIB


def sources():
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "schedules").rglob("*.py")])


MODULES = [name_of(path) for path in sources()]


@pytest.mark.parametrize("path", [pytest.param(path, id=name_of(path)) for path in sources()])
def test_imports(path):
    module = name_of(path)
    names = imports_in(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert [f"{name}: {breaches(module, name)}" for name in names if breaches(module, name)] == []


@pytest.mark.parametrize(
    ("module", "statement", "is_allowed"),
    [
        ("tvm_fuse.core.fold", "import numpy as np", True),
        ("tvm_fuse.core.fold", "from tvm_fuse.core import graph", True),
        ("tvm_fuse.core.fold", "from . import graph", True),
        ("tvm_fuse.core.fold", "from tvm_fuse import onnx", False),
        ("tvm_fuse.core.fold", "from .. import onnx", False),
        ("tvm_fuse.core.fold", "import onnx", False),
        ("tvm_fuse.core.fold", "def f():\n    import tvm", False),
        ("tvm_fuse.core.fold", "from tvm_fuse.onnx import read", False),
        ("tvm_fuse.relay.read", "from tvm_fuse.relay.base import relay, tvm", True),
        ("tvm_fuse.relay.read", "import tvm", False),
        ("tvm_fuse.relay.read", "from tvm import relay", False),
        ("tvm_fuse.relay.compat", "import tvm.relay", True),
        ("tvm_fuse.transform", "from tvm_fuse.relay.base import tvm", True),
        ("tvm_fuse.pipeline", "from tvm_fuse.relay.build import build_fused", True),
        ("tvm_fuse.pipeline", "from tvm_fuse.relay.base import tvm", False),
        ("tvm_fuse.pipeline", "import tvm", False),
        ("tvm_fuse.pipeline", "from tvm_fuse.cli import main", False),
        ("tvm_fuse.doctor", "from tvm_fuse.relay import compat", True),
        ("tvm_fuse.onnx.read", "import onnx", True),
        ("tvm_fuse.onnx.read", "from tvm_fuse.relay import compat", False),
        ("tvm_fuse.cuda.bundle", "import tvm", False),
        ("tvm_fuse.cuda.bundle", "from tvm_fuse.relay.export import export_model", False),
        ("tvm_fuse.runner.network", "from tvm_fuse.cuda.bundle import Bundle", True),
        ("tvm_fuse.runner.network", "import numpy", True),
        ("tvm_fuse.runner.network", "import tvm", False),
        ("tvm_fuse.runner.network", "import onnx", False),
        ("tvm_fuse.runner.network", "from tvm_fuse import pipeline", False),
        ("tvm_fuse.runner.network", "from tvm_fuse.onnx import read", False),
        ("tvm_fuse.cli.main", "from tvm_fuse.cli.args import make_parser", True),
        ("schedules.conv2d_epilogue", "from tvm import te", True),
    ],
)
def test_the_rules_themselves(module, statement, is_allowed):
    assert (not any(breaches(module, name) for name in imports_in(statement, module))) is is_allowed


# --- what is loaded, in a fresh process --------------------------------------------------------------

BLOCK_TVM = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "bitblas"):
            raise ImportError(name + " is blocked by this test")

sys.meta_path.insert(0, Block())
"""


def loaded_by(statements: str) -> set[str]:
    """The modules in a fresh process, with ``tvm`` blocked, after some statements."""
    code = f"{BLOCK_TVM}\n{statements}\nprint(*sys.modules, sep='\\n')"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_import_of_the_package_is_light():
    loaded = loaded_by("import tvm_fuse; tvm_fuse.__version__")
    assert {name for name in loaded if within(name, *THIRD_PARTY)} == set()
    assert {name for name in loaded if within(name, "tvm_fuse")} == {"tvm_fuse"}


@pytest.mark.parametrize("package", ["core", "onnx", "cuda", "cli"])
def test_packages_without_tvm(package):
    modules = [name for name in MODULES if within(name, f"tvm_fuse.{package}")]
    assert modules
    loaded = loaded_by("\n".join(f"import {name}" for name in modules))
    assert set(modules) <= loaded
    allowed = {"numpy", *({"onnx", "google", "ml_dtypes"} if package == "onnx" else ())}
    assert {name.split(".")[0] for name in loaded if within(name, *THIRD_PARTY)} <= allowed
    assert not {name for name in loaded if within(name, *FRONT_END)}


@pytest.mark.parametrize(
    "module", ["tvm_fuse.doctor", "tvm_fuse.importing", "tvm_fuse.report", "tvm_fuse.relay.compat"]
)
def test_single_modules_without_tvm(module):
    assert not {name for name in loaded_by(f"import {module}") if within(name, "tvm", "bitblas")}


def test_help_without_tvm():
    command = [
        sys.executable,
        "-c",
        f"{BLOCK_TVM}\nfrom tvm_fuse.cli import main\nsys.exit(main(['--help']))",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage: " in result.stdout


def test_the_block_works():
    with pytest.raises(AssertionError, match="blocked by this test"):
        loaded_by("import tvm")


def test_every_core_file_has_its_test_file():
    wanted = {f"test_{path.name}" for path in (PACKAGE / "core").glob("*.py") if path.name != "__init__.py"}
    assert wanted <= {path.name for path in (ROOT / "tests" / "core").glob("test_*.py")}
