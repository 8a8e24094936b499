"""Where a fused model runs: which place is chosen, and that the kernels themselves are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core.errors import MissingDependency, UsageError
from tvm_fuse.cuda.emulator import build_driver, build_emulator
from tvm_fuse.report import Execution, Place
from tvm_fuse.runner.driver import DeviceInfo

places = Lazy("tvm_fuse.places")
pipeline = Lazy("tvm_fuse.pipeline")
export = Lazy("tvm_fuse.relay.export")
load = Lazy("tvm_fuse.relay.load")
target = Lazy("tvm_fuse.relay.target")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

CUDA = "cuda -arch=sm_80"


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPUs are what a test says: those that TVM sees, and those that the driver sees."""

    def build(tvm=0, driver=()):
        def find(ordinal):
            if not driver:
                raise MissingDependency("no driver")
            if ordinal >= len(driver):
                raise UsageError(f"there is no device {ordinal}")
            return DeviceInfo(f"driver's {ordinal}", driver[ordinal], 1, "12.0")

        monkeypatch.setattr("tvm_fuse.places.has_cuda_device", lambda ordinal: ordinal < tvm)
        monkeypatch.setattr("tvm_fuse.places.cuda_device_name", lambda ordinal: f"TVM's {ordinal}")
        monkeypatch.setattr("tvm_fuse.places.find_device", find)

    return build


BOTH = {"tvm": 2, "driver": ("sm_80", "sm_80")}


@pytest.mark.parametrize(
    ("on", "device", "gpus", "execution"),
    [
        ("llvm", "auto", BOTH, (Place.CPU, "this machine's CPU")),
        (CUDA, "auto", BOTH, (Place.GPU_BY_TVM, "TVM's 0")),
        (CUDA, "1", BOTH, (Place.GPU_BY_TVM, "TVM's 1")),
        (CUDA, "auto", {"driver": ("sm_90",)}, (Place.GPU_BY_RUNNER, "driver's 0")),
        (CUDA, "1", {"driver": ("sm_75", "sm_80")}, (Place.GPU_BY_RUNNER, "driver's 1")),
        (CUDA, "1", {"tvm": 1, "driver": ("sm_80", "sm_80")}, (Place.GPU_BY_RUNNER, "driver's 1")),
        (CUDA, "auto", {"driver": ("sm_75",)}, (Place.CPU_BUILD, "this machine's CPU")),
        (CUDA, "auto", {}, (Place.CPU_BUILD, "this machine's CPU")),
        (CUDA, "cpu", BOTH, (Place.CPU_BUILD, "this machine's CPU")),
        (CUDA, "emulator", BOTH, (Place.EMULATOR, "the emulator")),
        (CUDA, "emulator", {}, (Place.EMULATOR, "the emulator")),
    ],
)
def test_the_place_that_is_chosen(machine, on, device, gpus, execution):
    machine(**gpus)
    chosen = places.choose_runner(target.resolve_target(on), device)
    assert chosen.execution == Execution(*execution)


@pytest.mark.parametrize(
    ("on", "device", "options", "error", "message"),
    [
        ("llvm", "emulator", {}, UsageError, "--device emulator is for CUDA targets; the target is llvm"),
        ("llvm", "0", {}, UsageError, "--device 0 is for CUDA targets"),
        (CUDA, "first", {}, UsageError, "--device first: wanted auto, the number of a GPU, emulator or cpu"),
        (CUDA, "-1", {}, UsageError, "--device -1: wanted auto"),
        (CUDA, "", {}, UsageError, "wanted auto"),
        (CUDA, "0", {"driver": ()}, MissingDependency, "no driver"),
        (CUDA, "2", {}, UsageError, "there is no device 2"),
        (CUDA, "0", {}, UsageError, r"GPU 0 \(driver's 0\) is sm_75, which runs no code for sm_80"),
        (CUDA, "auto", {"is_checked": True}, UsageError, "--checked is for the emulator"),
        ("llvm", "auto", {"is_checked": True}, UsageError, "--checked is for the emulator"),
    ],
)
def test_a_place_that_is_refused(machine, on, device, options, error, message):
    machine(driver=options.get("driver", ("sm_75",)))
    is_checked = options.get("is_checked", False)
    with pytest.raises(error, match=message):
        places.choose_runner(target.resolve_target(on), device, is_checked=is_checked)


def test_an_emulator_without_a_compiler_is_refused_before_the_work(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(MissingDependency, match=r"needs a C\+\+ compiler"):
        places.choose_runner(target.resolve_target(CUDA), "emulator")


def test_why_no_kernel_ran_is_told(machine):
    machine(driver=("sm_75",))
    assert "sm_75, which runs no code for sm_80" in places.choose_runner(target.resolve_target(CUDA)).why
    machine()
    assert places.choose_runner(target.resolve_target(CUDA)).why == "no GPU is visible"


# --- the kernels themselves ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The emulator's driver, under the name of a real one."""
    folder = tmp_path_factory.mktemp("driver")
    return build_driver(folder).rename(folder / "libcuda.so.1")


@pytest.fixture
def gpu(driver, tmp_path, monkeypatch):
    """A driver that TVM in this process knows nothing of; its "cubins" are emulated kernels."""

    def compile_cuda(source, arch):
        library = build_emulator(source, folder=tmp_path).library()
        return replace(compiled(source, arch), cubin=library.read_bytes())

    compiled = export.compile_cuda
    monkeypatch.setattr("tvm_fuse.relay.export.compile_cuda", compile_cuda)
    monkeypatch.setattr("tvm_fuse.places.has_cuda_device", lambda ordinal: False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.parent))


def model():
    net = Net()
    x = net.input("x", (1, 8, 6, 6))
    return load.model_from_module(net.module(relay.nn.relu(net.batch_norm(net.conv2d(x, 8)))))


@pytest.mark.usefixtures("gpu")
def test_a_driver_that_tvm_does_not_see_is_used(monkeypatch):
    monkeypatch.setattr("tvm_fuse.places._REPEATS", 2)
    report = pipeline.compile_model(model(), CUDA, pipeline.Options(seed=3)).report
    assert report.execution.place is Place.GPU_BY_RUNNER
    assert "emulator" in report.execution.device.lower()
    assert (report.parity.passed, report.parity.seed, len(report.parity.rows)) == (True, 3, 1)
    assert report.latency.unfused == ()
    assert len(report.latency.fused) == 2
    assert min(report.latency.fused) > 0


@pytest.mark.usefixtures("gpu")
def test_without_latency_nothing_is_measured():
    report = pipeline.compile_model(model(), CUDA, pipeline.Options(latency=False, device="0")).report
    assert (report.execution.place, report.latency) == (Place.GPU_BY_RUNNER, None)


def test_the_kernels_that_are_kept_are_those_that_ran(monkeypatch):
    """The bundle is built once more, with weights as inputs; its source is that of the report's library."""
    sources = []
    right = export.compile_cuda
    monkeypatch.setattr(
        "tvm_fuse.relay.export.compile_cuda",
        lambda source, arch: sources.append(source) or right(source, arch),
    )
    compiled = pipeline.compile_model(model(), CUDA, pipeline.Options(device="emulator"))
    assert sources == [compiled.cuda_source]
    assert compiled.report.execution == Execution(Place.EMULATOR, "the emulator")
    assert compiled.report.parity.passed
    assert compiled.report.latency is None
