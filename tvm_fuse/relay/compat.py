"""Finds a TVM that has Relay and imports it; nothing else in the project runs ``import tvm`` first.

Order: an importable ``tvm`` with Relay (TVM 0.19 or older); else the one embedded in the
``bitblas`` wheel, which is used from where it lies, without importing bitblas. The embedded
one is linked against CUDA, so its CUDA libraries are loaded from their pip packages, and on
a machine without the NVIDIA driver a stand-in for the driver (``native/driver_stub.c``) is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.cuda.wheels import find_in_wheels

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CudaDriver",
    "TvmBase",
    "find_tvm",
    "load_cuda_driver",
    "load_tvm",
    "require_relay",
    "worker_environment",
]

INSTALL_RELAY = 'pip install "tvm-fuse[relay]"'

_UNTUNED_WARNINGS = (
    "Cannot find config for target",
    "Cannot find tuned schedules",
    "One or more operators have not been tuned",
)
_XGBOOST_NOISE = "Your system has an old version of glibc"  # said by its CPU build on every system
_EMBEDDED_TVM = ("3rdparty", "tvm", "python", "tvm")  # below the bitblas package
_CUDA_LIBRARIES = {  # file below the namespace package "nvidia" -> pip package
    "cuda_runtime/lib/libcudart.so.12": "nvidia-cuda-runtime-cu12",
    "cuda_nvrtc/lib/libnvrtc.so.12": "nvidia-cuda-nvrtc-cu12",
}


@dataclass(frozen=True)
class TvmBase:
    """The TVM that is, or would be, in use.

    Attributes:
        origin: ``installed`` (the user's own) or ``embedded`` (inside the bitblas wheel).
        path: The ``tvm`` package folder.
        version: As its sources say, ``unknown`` when they do not.
    """

    origin: str
    path: Path
    version: str

    def __str__(self) -> str:
        return f"TVM {self.version} ({self.origin}, {self.path})"


@dataclass(frozen=True)
class CudaDriver:
    """The ``libcuda.so.1`` of this process.

    Attributes:
        kind: ``real``, ``stub`` (ours: it answers "no device") or ``none``.
        path: The stub's file; None for a real driver, which the system's loader finds.
    """

    kind: str
    path: Path | None = None


def find_tvm() -> TvmBase:
    """Says which TVM `load_tvm` would use, from file locations alone.

    Returns:
        The TVM with Relay; one that is already imported is preferred.

    Raises:
        MissingDependency: No TVM with Relay is installed, or one without Relay is imported.
    """
    installed, embedded = _find_installed(), _find_embedded()
    if installed is not None and _has_relay(installed) and installed != embedded:
        return TvmBase("installed", installed, _read_version(installed))
    if "tvm" in sys.modules and installed != embedded:
        raise MissingDependency(
            f"a TVM without Relay is already imported ({_describe(installed)}); wanted TVM <= 0.19",
            "call tvm_fuse before `import tvm`, or uninstall that TVM",
        )
    if embedded is not None:
        return TvmBase("embedded", embedded, _read_version(embedded))
    if installed is None:
        raise MissingDependency("no TVM is installed; wanted one with Relay (TVM <= 0.19)", INSTALL_RELAY)
    raise MissingDependency(
        f"the installed TVM has no Relay ({_describe(installed)}); wanted TVM <= 0.19",
        f"{INSTALL_RELAY} (adds a TVM 0.17 beside it; nothing has to be uninstalled)",
    )


@functools.cache
def load_tvm() -> types.ModuleType:
    """Imports the TVM that `find_tvm` names; further calls return the same module.

    Also makes TVM quiet and offline: no TopHub downloads (unless ``TOPHUB_LOCATION`` is
    set), no warning for each operator without a tuned schedule.

    Returns:
        The ``tvm`` module, with ``tvm.relay`` importable.

    Raises:
        MissingDependency: There is none, or it cannot be imported here; says what to do.
    """
    base = find_tvm()
    os.environ.setdefault("TOPHUB_LOCATION", "NONE")
    # Left alone TVM takes half of the processors for threads of the others' cores.
    os.environ.setdefault("TVM_NUM_THREADS", str(read_cpu().cores))
    os.environ.setdefault("PATH", os.defpath)  # TVM looks for a C++ compiler in PATH only
    if base.origin == "embedded":
        _check_numpy()
        _load_cuda_libraries()
    _provide_onnx_mapping()
    warnings.filterwarnings("ignore", _XGBOOST_NOISE, FutureWarning)
    for name in ("autotvm", "auto_scheduler"):
        logging.getLogger(name).addFilter(_is_not_untuned_warning)
    try:
        with warnings.catch_warnings(), _scratch_working_directory():
            warnings.simplefilter("ignore")  # deprecations inside TVM are not the user's
            tvm = _import_package("tvm", base.path)
            importlib.import_module("tvm.relay")
    except Exception as error:  # whatever TVM's import can raise: OSError, AttributeError, ...
        raise MissingDependency(
            f"{base} was found but cannot be imported: {type(error).__name__}: {error}",
            f"{INSTALL_RELAY} installs one with all that it needs",
        ) from error
    return tvm


def require_relay() -> types.ModuleType:
    """Returns the module ``tvm.relay``.

    Raises:
        MissingDependency: As `load_tvm`.
    """
    load_tvm()
    return importlib.import_module("tvm.relay")


@contextlib.contextmanager
def worker_environment() -> Iterator[None]:
    """Lets Python processes started in this block import the same TVM.

    TVM's tuners measure in workers (``python -m tvm.exec.popen_worker``) that know nothing
    of this module; they get the paths through the environment, which is restored after.
    """
    load_tvm()
    base = find_tvm()
    libraries: list[Path | None] = []
    if base.origin == "embedded":
        libraries = [*map(find_in_wheels, _CUDA_LIBRARIES), load_cuda_driver().path]
    additions = {
        "PYTHONPATH": (os.pathsep, [str(base.path.parent)]),
        "LD_LIBRARY_PATH": (os.pathsep, [str(file.parent) for file in libraries if file is not None]),
        "PYTHONWARNINGS": (",", [f"ignore:{_XGBOOST_NOISE}:FutureWarning"]),
    }
    before = {name: os.environ.get(name) for name in additions}
    for name, (separator, items) in additions.items():
        os.environ[name] = separator.join(filter(None, [*items, before[name]]))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@functools.cache
def load_cuda_driver() -> CudaDriver:
    """Loads ``libcuda.so.1`` into the process: the real driver, else our stub."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return _load_driver_stub()
    return CudaDriver("stub" if hasattr(library, "tvm_fuse_driver_stub") else "real")


def _find_installed() -> Path | None:
    """Folder of the top-level ``tvm`` package, imported or importable, without importing it."""
    if "tvm" in sys.modules:
        file = getattr(sys.modules["tvm"], "__file__", None)
        return Path(file).resolve().parent if file else None
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:  # no origin: just some folder called tvm
        return None
    return Path(spec.origin).resolve().parent


def _find_embedded() -> Path | None:
    """Folder of the ``tvm`` package inside bitblas; find_spec does not run bitblas' own code."""
    spec = importlib.util.find_spec("bitblas")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    candidates = (Path(folder, *_EMBEDDED_TVM).resolve() for folder in folders)
    return next((path for path in candidates if _has_relay(path)), None)


def _has_relay(package: Path) -> bool:
    return (package / "relay" / "__init__.py").is_file()


def _read_version(package: Path) -> str:
    for name in ("_ffi/libinfo.py", "libinfo.py", "_version.py", "version.py"):
        file = package / name
        text = file.read_text() if file.is_file() else ""
        found = re.search(r"^__version__\s*=\s*[\"'](.+?)[\"']", text, re.M)
        if found:
            return found.group(1)
    for distribution in ("apache-tvm", "tvm", "hhb-tvm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"


def _describe(package: Path | None) -> str:
    return f"version {_read_version(package)}, {package}" if package else "not a package"


def _import_package(name: str, folder: Path) -> types.ModuleType:
    """Imports a top-level package from one folder, whatever else of that name is on sys.path."""
    if name in sys.modules:
        return sys.modules[name]
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{init} is not a Python package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


@contextlib.contextmanager
def _scratch_working_directory() -> Iterator[None]:
    """TVM's import makes a cache folder where it runs, and fails where it may not: let it do so elsewhere."""
    here = os.open(".", os.O_RDONLY)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            try:
                yield
            finally:
                os.fchdir(here)
    finally:
        os.close(here)


def _check_numpy() -> None:
    """The embedded TVM uses names that NumPy 2 removed; better said now than by a traceback."""
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependency("NumPy is not installed", INSTALL_RELAY) from error
    if int(version.split(".")[0]) >= 2:
        raise MissingDependency(
            f"the embedded TVM 0.17 needs numpy<2; found numpy {version}",
            f'pip install "numpy<2" (or {INSTALL_RELAY} in a fresh environment)',
        )


def _load_cuda_libraries() -> None:
    """Puts libcudart, libnvrtc and libcuda where libtvm.so finds them: into this process."""
    for name, package in _CUDA_LIBRARIES.items():
        file = find_in_wheels(name)
        try:
            ctypes.CDLL(str(file) if file else Path(name).name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MissingDependency(
                f"the embedded TVM needs {Path(name).name}: {error}",
                f"pip install {package}, or {INSTALL_RELAY}",
            ) from error
    if load_cuda_driver().kind == "none":
        raise MissingDependency(
            "the embedded TVM needs libcuda.so.1; found neither an NVIDIA driver nor our stub of it",
            "install tvm-fuse with pip (`pip install .`): that builds the stub",
        )


def _load_driver_stub() -> CudaDriver:
    package = sys.modules["tvm_fuse"]
    for folder in package.__path__:  # an editable install has two: the sources and what was built
        file = Path(folder, "native_lib", "libcuda.so.1")
        if file.is_file():
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            return CudaDriver("stub", file)
    return CudaDriver("none")


def _is_not_untuned_warning(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _UNTUNED_WARNINGS)


def _provide_onnx_mapping() -> None:
    """Gives TVM's ONNX front end the module that onnx 1.19 removed, filled on first use."""
    spec = importlib.util.find_spec("onnx")
    if spec is None or spec.origin is None or "onnx.mapping" in sys.modules:
        return
    if (Path(spec.origin).parent / "mapping.py").is_file():
        return

    def __getattr__(name: str) -> Any:  # noqa: N807  (PEP 562)
        if name != "TENSOR_TYPE_TO_NP_TYPE":
            raise AttributeError(name)
        from onnx import helper

        return {kind: helper.tensor_dtype_to_np_dtype(kind) for kind in helper.get_all_tensor_dtypes()}

    module = types.ModuleType("onnx.mapping", "Stand-in by tvm_fuse for the module that onnx 1.19 removed.")
    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules["onnx.mapping"] = module
