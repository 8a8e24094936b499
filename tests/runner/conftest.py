"""The stand-in for the driver, and a bundle for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.bundles import save


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "bundle")
    return tmp_path / "bundle"
