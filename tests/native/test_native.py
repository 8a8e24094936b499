"""The C++ host: its own tests, and the same bundles as the Python runner, to the same reports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.native.testdata import TESTDATA, emulated_kernels, export, golden_header
from tests.support.bundles import bundle, expected, save, seeded
from tvm_fuse.cuda.bundle import Tensor
from tvm_fuse.cuda.bundle_files import load_bundle, load_golden, load_parameters, save_bundle
from tvm_fuse.cuda.emulator import build_driver, build_emulator
from tvm_fuse.runner.report import to_json
from tvm_fuse.runner.run import RunOptions, run_bundle

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **environment):
    """A program: exit code, standard output, standard error."""
    done = subprocess.run(
        [*map(str, command)], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of a build without optimization, which is quick to make."""
    for program in ("cmake", "ctest", "cc", "c++"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    folder = tmp_path_factory.mktemp("native")
    parallel = str(os.cpu_count() or 1)
    for step in (["-S", ROOT, "-B", folder, "-DCMAKE_BUILD_TYPE=Debug"], ["--build", folder, "-j", parallel]):
        code, out, err = run("cmake", *step)
        assert code == 0, out + err
    return folder


@pytest.fixture(scope="session")
def program(built):
    return built / "native" / "tvm-fuse-run"


@pytest.fixture(scope="session")
def fake_driver(built):
    return built / "native" / "tests" / "libfake_driver.so"


# --- its own tests ---------------------------------------------------------------------------------


def test_ctest(built):
    code, out, err = run("ctest", "--test-dir", built, "--output-on-failure")
    assert code == 0, out + err
    assert "100% tests passed, 0 tests failed out of 6" in out


def test_ctest_finds_what_is_wrong(built, tmp_path):
    """The C program against other golden numbers than those of its network."""
    code, _, err = run(built / "native" / "tests" / "test_network", tmp_path / "no-driver.so")
    assert code > 0
    assert "FAILED: init; the last error is: the CUDA driver cannot be loaded" in err


@pytest.mark.slow
def test_ctest_under_sanitizers(built, tmp_path):
    configure = ["-S", ROOT, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Debug", "-DTVM_FUSE_SANITIZE=ON"]
    for step in (["cmake", *configure], ["cmake", "--build", tmp_path], ["ctest", "--test-dir", tmp_path]):
        code, out, err = run(*step)
        assert code == 0, out + err


@pytest.mark.slow
def test_it_installs_and_links_outside_cmake(built, tmp_path):
    """A shared library, a C compiler and nothing else."""
    configure = ["-S", ROOT, "-B", tmp_path / "build", "-DBUILD_SHARED_LIBS=ON", "-DTVM_FUSE_TESTS=OFF"]
    install = ["--install", tmp_path / "build", "--prefix", tmp_path / "usr"]
    for step in (configure, ["--build", tmp_path / "build"], install):
        code, out, err = run("cmake", *step)
        assert code == 0, out + err
    (lib,) = {path.parent for path in (tmp_path / "usr").rglob("libtvm_fuse_runner.so")}
    _, symbols, _ = run("nm", "-D", "--defined-only", lib / "libtvm_fuse_runner.so")
    ours = {line.split()[-1] for line in symbols.splitlines() if "tvm_fuse" in line}
    assert all(name.startswith("tvm_fuse_") for name in ours), ours
    definition = f'-DTVM_FUSE_TESTDATA="{TESTDATA}"'
    source = ROOT / "native" / "tests" / "test_api.c"
    headers = f"-I{tmp_path / 'usr' / 'include'}"
    link = [f"-L{lib}", "-ltvm_fuse_runner", "-lm"]
    code, out, err = run("cc", definition, headers, source, "-o", tmp_path / "api", *link)
    assert code == 0, out + err
    names = ("emulated_driver", "emulated_kernels", "fake_driver")
    libraries = [built / "native" / "tests" / f"lib{name}.so" for name in names]
    code, _, err = run(tmp_path / "api", *libraries, LD_LIBRARY_PATH=str(lib))
    assert code == 0, err


# --- its document ------------------------------------------------------------------------------------


def test_the_options_are_documented(program):
    page = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
    table = "".join(re.findall(r"^\| option of `tvm-fuse-run`.*\n((?:\|.*\n)+)", page, re.M))
    _, usage, _ = run(program, "--help")
    assert set(re.findall(r"`(--[a-z]+)", table)) == set(re.findall(r"--[a-z]+", usage)) - {"--help"}


@pytest.mark.slow
def test_the_project_in_the_document(built, tmp_path):
    """It is built as it stands there, with another network of those names."""
    page = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
    for file, language in (("CMakeLists.txt", "cmake"), ("app.c", "c")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)
        (tmp_path / file).write_text(block, encoding="utf-8")
    (tmp_path / "tvm-fuse").symlink_to(ROOT)
    save(tmp_path / "mobilenet_v2-bundle")
    description = tmp_path / "mobilenet_v2-bundle" / "bundle.json"
    text = description.read_text(encoding="utf-8")
    for ours, theirs in (("x", "image"), ("y", "scores")):
        text = text.replace(f'"name": "{ours}"', f'"name": "{theirs}"')
    description.write_text(text, encoding="utf-8")
    for step in (["-S", tmp_path, "-B", tmp_path / "build"], ["--build", tmp_path / "build"]):
        code, out, err = run("cmake", *step)
        assert code == 0, out + err
    code, _, err = run(tmp_path / "build" / "app")
    assert code in (2, 4, 5), err  # there is no driver, or no machine code in that bundle
    assert "driver" in err or "machine code" in err or "cuModuleLoadData" in err


# --- the same as the Python runner -----------------------------------------------------------------


def outline(value):
    """A JSON value with its numbers left out: field names, lengths of lists, types."""
    if isinstance(value, dict):
        return {name: outline(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [outline(entry) for entry in value]
    return type(value).__name__


def test_the_report_is_that_of_the_python_runner(program, fake_driver, tmp_path):
    """On one driver: one document, but for times, and hence for all that does not depend on them one text."""
    save(tmp_path, bundle(model='a "model"'))
    options = RunOptions(library=str(_with_loader(fake_driver)), repeats=2, warmup=0, kernels=True)
    wanted = json.loads(to_json(run_bundle(tmp_path, options)))
    arguments = [tmp_path, "--driver", fake_driver, "--repeats", "2", "--warmup", "0", "--kernels", "--json"]
    code, out, err = run(program, *arguments)
    assert code == 0, err
    got = json.loads(out)
    assert outline(got) == outline(wanted)
    for name in set(wanted) - {"timings", "kernels"}:
        assert got[name] == wanted[name], name


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_the_text_is_that_of_the_python_runner(program, fake_driver, tmp_path, wrong):
    save(tmp_path, y=expected() + 1e-3 if wrong else None)
    paths = {"LD_LIBRARY_PATH": str(_with_loader(fake_driver).parent)}
    command = [sys.executable, "-m", "tvm_fuse.runner", tmp_path, "--repeats", "0"]
    code, text, err = run(*command, **paths, PYTHONPATH=str(ROOT))
    assert code == wrong, err
    assert run(program, tmp_path, "--driver", fake_driver, "--repeats", "0") == (int(wrong), text, "")


def _with_loader(fake_driver):
    """The stand-in under the name that the Python runner loads."""
    library = fake_driver.parent / "libcuda.so.1"
    if not library.exists():
        library.symlink_to(fake_driver)
    return library


def test_drawn_parameters_are_numpys(program, fake_driver, tmp_path):
    """A few thousand of them, bit for bit."""
    made = _large(seeded())
    w = load_parameters(tmp_path, _save_large(tmp_path, made, None))["w"]
    _save_large(tmp_path, made, expected(_large_x(), w))
    code, out, err = run(program, tmp_path, "--driver", fake_driver, "--repeats", "0", "--json")
    assert code == 0, err
    assert json.loads(out)["parity"]["rows"][0]["max_abs"] == 0


def _large(made):
    shape = (50, 61)
    size = 4 * 50 * 61
    kernels = tuple(replace(kernel, grid=(50, 1, 1), block=(61, 1, 1)) for kernel in made.kernels)
    tensors = tuple(Tensor(shape, "float32", index) for index in range(4))
    space = replace(made.workspaces[0], size_bytes=size)
    return replace(made, kernels=kernels, tensors=tensors, storages=(size,) * 4, workspaces=(space,))


def _large_x():
    return np.random.default_rng(0).standard_normal((50, 61), dtype=np.float32)


def _save_large(folder, made, y):
    from tests.support.bundles import KERNEL_FILES

    x = _large_x()
    return save_bundle(folder, made, KERNEL_FILES, {}, ({"x": x}, {"y": x if y is None else y}))


# --- the committed bundles, and fresh ones ---------------------------------------------------------


def test_the_committed_bundles_are_what_python_reads():
    for name in ("net", "by_hand", "by_hand_seeded"):
        made = load_bundle(TESTDATA / name)
        load_parameters(TESTDATA / name, made)
        load_golden(TESTDATA / name, made)
    hint = "python -m tests.native.testdata"
    assert (TESTDATA / "net_golden.h").read_text() == golden_header(TESTDATA / "net"), hint
    assert (TESTDATA / "net_kernels.cpp").read_text() == emulated_kernels(TESTDATA / "net"), hint


def run_on_emulator(program, folder, scratch):
    """A bundle on the emulator, by the C++ runner."""
    source = (folder / "kernels.cu").read_text(encoding="utf-8")
    module = build_emulator(source, folder=scratch)
    image = module.library(checked=False)
    code, out, err = run(program, folder, "--driver", build_driver(scratch), "--image", image, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.relay
@pytest.mark.cuda_codegen
def test_a_bundle_as_it_is_exported_now(program, tmp_path):
    made = export(tmp_path / "net")
    committed = load_bundle(TESTDATA / "net")
    assert [(port.name, port.tolerance) for port in made.outputs] == [
        (port.name, port.tolerance) for port in committed.outputs
    ]
    report = run_on_emulator(program, tmp_path / "net", tmp_path)
    assert report["passed"]
    assert report["launches"] == made.launch_count


@pytest.mark.slow
@pytest.mark.relay
@pytest.mark.cuda_codegen
def test_mobilenet(program, tmp_path):
    """Golden outputs within 1e-5 of ONNX Runtime's, and the runner's within 1e-5 of them."""
    onnxruntime = pytest.importorskip("onnxruntime")
    from examples.models import MODELS
    from examples.models import save as save_model
    from tvm_fuse.relay.export import ExportOptions, export_file

    file, folder = tmp_path / "mobilenet_v2.onnx", tmp_path / "bundle"
    save_model(MODELS["mobilenet_v2"](image=96), file)
    made = export_file(file, folder, "cuda -arch=sm_80", ExportOptions())
    inputs, outputs = load_golden(folder, made)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [port.name for port in made.outputs]
    for name, wanted in zip(names, session.run(names, inputs)):
        assert np.abs(outputs[name] - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())
    (row,) = run_on_emulator(program, folder, tmp_path)["parity"]["rows"]
    assert row["failing"] == 0
    assert row["tolerance"]["atol"] == 1e-5
    assert row["reference_max"] > 1e-2
