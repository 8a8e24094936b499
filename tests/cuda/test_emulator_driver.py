"""The emulated CUDA driver, called as a runner calls the real one."""

from __future__ import annotations

import ctypes as c
import threading

import numpy as np
import pytest

from tvm_fuse.cuda.emulator import build_driver, build_emulator

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(128) add(const float* x, float* y, float a, int n) {
  __shared__ float copy[128];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  copy[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = copy[threadIdx.x] + a;
}
extern "C" __global__ void too_far(float* y) { y[threadIdx.x] = 1.0f; }
extern "C" __global__ void dynamic(float* y) {
  extern __shared__ float memory[];
  memory[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = memory[blockDim.x - 1 - threadIdx.x];
}
"""

MAX_DYNAMIC = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """Calls that raise what the driver answers."""

    def __init__(self, path):
        self.library = c.CDLL(str(path))
        self.library.tvm_fuse_emulator_fault.restype = c.c_char_p

    def __call__(self, function, *args):
        code = getattr(self.library, function)(*args)
        name = c.c_char_p()
        self.library.cuGetErrorName(code, c.byref(name))
        if code:
            raise RuntimeError(name.value.decode())

    def start(self):
        device, context = c.c_int(), c.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", c.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self("cuCtxSetCurrent", context)
        return self

    def get(self, kind, function, *args):
        value = kind()
        self(function, c.byref(value), *args)
        return value.value

    def alloc(self, size):
        return c.c_uint64(self.get(c.c_uint64, "cuMemAlloc_v2", c.c_size_t(size)))

    def put(self, array):
        address = self.alloc(array.nbytes)
        self("cuMemcpyHtoD_v2", address, array.ctypes.data_as(c.c_void_p), c.c_size_t(array.nbytes))
        return address

    def fetch(self, address, count):
        array = np.empty(count, "float32")
        self("cuMemcpyDtoH_v2", array.ctypes.data_as(c.c_void_p), address, c.c_size_t(array.nbytes))
        return array

    def function(self, path, name):
        module = c.c_void_p(self.get(c.c_void_p, "cuModuleLoad", str(path).encode()))
        return c.c_void_p(self.get(c.c_void_p, "cuModuleGetFunction", module, name.encode()))

    def launch(self, function, grid, block, *args, shared=0):
        addresses = (c.c_void_p * len(args))(*[c.cast(c.byref(arg), c.c_void_p) for arg in args])
        sizes = [c.c_uint(size) for size in (grid, 1, 1, block, 1, 1, shared)]
        self("cuLaunchKernel", function, *sizes, None, addresses, None)
        self("cuCtxSynchronize")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return Driver(build_driver(tmp_path_factory.mktemp("driver"))).start()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return build_emulator(SOURCE, folder=tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("checked", [False, True])
def test_copies_and_a_launch(driver, emulator, checked):
    x = np.arange(1000, dtype="float32")
    address, result = driver.put(x), driver.alloc(x.nbytes)
    assert np.isnan(driver.fetch(result, 1000)).all()  # nothing has written it
    function = driver.function(emulator.library(checked=checked), "add")
    driver.launch(function, 8, 128, address, result, c.c_float(0.5), c.c_int(1000))
    assert (driver.fetch(result, 1000) == x + 0.5).all()
    driver("cuMemcpyDtoD_v2", result, address, c.c_size_t(x.nbytes))
    driver("cuMemsetD32_v2", address, 0x40000000, c.c_size_t(500))
    driver("cuMemsetD8_v2", address, 0, c.c_size_t(4))
    assert (driver.fetch(result, 1000) == x).all()
    assert driver.fetch(address, 1000).tolist() == [0, *[2] * 499, *x[500:]]
    driver("cuMemFree_v2", address)


def test_a_module_from_memory(driver, emulator):
    image = emulator.library().read_bytes()
    module = c.c_void_p(driver.get(c.c_void_p, "cuModuleLoadData", image))
    function = c.c_void_p(driver.get(c.c_void_p, "cuModuleGetFunction", module, b"too_far"))
    result = driver.alloc(4)
    driver.launch(function, 1, 1, result)
    assert driver.fetch(result, 1).tolist() == [1]
    driver("cuModuleUnload", module)


def test_attributes_of_functions(driver, emulator):
    function = driver.function(emulator.library(), "add")
    values = [driver.get(c.c_int, "cuFuncGetAttribute", which, function) for which in (0, 1, MAX_DYNAMIC)]
    assert values == [128, 512, 48 * 1024 - 512]


def test_dynamic_shared_memory_must_be_asked_for(driver, emulator):
    function, result = driver.function(emulator.library(), "dynamic"), driver.alloc(256)
    driver.launch(function, 1, 64, result, shared=256)
    assert driver.fetch(result, 64).tolist() == list(range(63, -1, -1))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.launch(function, 1, 64, result, shared=60_000)
    driver("cuFuncSetAttribute", function, MAX_DYNAMIC, 60_000)
    driver.launch(function, 1, 64, result, shared=60_000)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        driver("cuFuncSetAttribute", function, MAX_DYNAMIC, 228 * 1024)


@pytest.mark.parametrize(
    ("checked", "fault"),
    [
        (
            True,
            b"out of bounds: 4 bytes at y[32], which has 32 elements (block (0, 0, 0), thread (32, 0, 0))",
        ),
        (False, b"out of bounds: wrote beside an allocation"),
    ],
)
def test_writes_beside_an_allocation(driver, emulator, checked, fault):
    function = driver.function(emulator.library(checked=checked), "too_far")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.launch(function, 1, 33, driver.alloc(128))
    assert driver.library.tvm_fuse_emulator_fault() == b"too_far: " + fault


def test_streams_and_events(driver):
    stream = c.c_void_p(driver.get(c.c_void_p, "cuStreamCreate", 0))
    first, last = (c.c_void_p(driver.get(c.c_void_p, "cuEventCreate", 0)) for _ in range(2))
    driver("cuEventRecord", first, stream)
    threading.Event().wait(0.01)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_HANDLE"):
        driver.get(c.c_float, "cuEventElapsedTime", first, last)
    driver("cuEventRecord", last, stream)
    driver("cuEventSynchronize", last)
    assert driver.get(c.c_float, "cuEventElapsedTime", first, last) >= 10
    for event in (first, last):
        driver("cuEventDestroy_v2", event)
    driver("cuStreamDestroy_v2", stream)


def test_graphs_are_not_supported(driver):
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_SUPPORTED"):
        driver("cuStreamBeginCapture_v2", None, 2)


def test_the_device(driver):
    name = c.create_string_buffer(100)
    driver("cuDeviceGetName", name, 100, 0)
    assert name.value == b"tvm-fuse CPU emulator"
    assert [driver.get(c.c_int, "cuDeviceGetAttribute", which, 0) for which in (1, 10, 16, 75, 76)] == [
        1024, 32, 1, 8, 0,
    ]  # fmt: skip


# --- mistakes of the caller --------------------------------------------------------------------------


def test_before_init_and_without_a_context(tmp_path):
    driver = Driver(build_driver(tmp_path))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_INITIALIZED"):
        driver.get(c.c_int, "cuDeviceGet", 0)
    driver("cuInit", 0)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT"):
        driver.alloc(4)
    driver.start().alloc(4)
    seen = []

    def allocate():  # a context is current in one thread
        try:
            driver.alloc(4)
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert seen == ["CUDA_ERROR_INVALID_CONTEXT"]


@pytest.mark.parametrize(
    ("function", "args", "error"),
    [
        ("cuDeviceGet", [c.byref(c.c_int()), 1], "CUDA_ERROR_INVALID_DEVICE"),
        ("cuMemAlloc_v2", [c.byref(c.c_uint64()), c.c_size_t(0)], "CUDA_ERROR_INVALID_VALUE"),
        ("cuMemFree_v2", [c.c_uint64(64)], "CUDA_ERROR_INVALID_VALUE"),
        ("cuMemcpyHtoD_v2", [c.c_uint64(64), b"1234", c.c_size_t(4)], "CUDA_ERROR_INVALID_VALUE"),
        ("cuModuleLoad", [c.byref(c.c_void_p()), b"/no/such/file"], "CUDA_ERROR_FILE_NOT_FOUND"),
        ("cuModuleLoad", [c.byref(c.c_void_p()), __file__.encode()], "CUDA_ERROR_INVALID_IMAGE"),
        ("cuModuleLoadData", [c.byref(c.c_void_p()), b"x" * 64], "CUDA_ERROR_INVALID_IMAGE"),
        ("cuLaunchKernel", [None, *[1] * 7, None, None, None], "CUDA_ERROR_INVALID_HANDLE"),
    ],
)
def test_wrong_calls(driver, function, args, error):
    with pytest.raises(RuntimeError, match=error):
        driver(function, *args)


def test_an_unknown_kernel_and_too_many_threads(driver, emulator):
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_FOUND"):
        driver.function(emulator.library(), "subtract")
    function, address = driver.function(emulator.library(), "add"), driver.alloc(4)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        driver.launch(function, 1, 256, address, address, c.c_float(0), c.c_int(1))


def test_copies_stay_inside_allocations(driver):
    address = driver.alloc(16)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.fetch(address, 5)
    assert driver.fetch(c.c_uint64(address.value + 8), 2).shape == (2,)


def test_errors_have_texts(driver):
    text = c.c_char_p()
    assert driver.library.cuGetErrorString(801, c.byref(text)) == 0
    assert text.value == b"operation not supported"
    assert driver.library.cuGetErrorName(9999, c.byref(text)) == 1
