// tvm-fuse-run as a program: exit codes and messages, on the emulator and on a driver that fails on request.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/wait.h>

#include "check.h"
#include "variants.h"

using variants::Folder;

namespace {

std::string program, emulator, kernels, fake;

struct Done {
  int code;
  std::string text;  // both streams
};

Done run(const std::string& arguments) {
  FILE* pipe = popen(("'" + program + "' " + arguments + " 2>&1").c_str(), "r");
  std::string text;
  char piece[4096];
  for (size_t got; (got = fread(piece, 1, sizeof piece, pipe)) > 0;) text.append(piece, got);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

void expect(const std::string& arguments, int code, const std::string& part) {
  const Done done = run(arguments);
  check_equal(done.code, code, "exit code of " + arguments + ": " + done.text);
  check_contains(done.text, part, arguments);
}

std::string data(const std::string& name) { return std::string("'") + TVM_FUSE_TESTDATA + "/" + name + "'"; }
std::string on_emulator() { return " --driver '" + emulator + "' --image '" + kernels + "' "; }
std::string on_fake() { return " --driver '" + fake + "' --repeats 2 --warmup 1 "; }

void test_right_results() {
  expect(data("net") + on_emulator(), 0, "Parity with the golden outputs ................");
  expect(data("net") + on_emulator() + "--json", 0, "\"is_emulated\": true");
  expect(data("net") + on_emulator() + "--repeats 2 --kernels", 0, "note: not measured as a CUDA graph: cuStreamBeginCapture_v2 failed: CUDA_ERROR_NOT_SUPPORTED");
  expect(data("by_hand") + on_fake() + "--kernels", 0, "  as a CUDA graph ");
  expect(data("by_hand_seeded") + on_fake() + "--json", 0, "\"max_abs\": 0.0");  // NumPy's stream, bit for bit
  expect("--help", 0, "usage: tvm-fuse-run BUNDLE");
}

// The second workspace is written between a write and a read of the first one.
void test_workspaces() {
  Folder folder("by_hand");
  const std::string tensor = "\"kind\": \"tensor\",\n       \"value\": ", between = "\n      },\n      {\n       ";
  const std::string first = "\"kind\": \"workspace\",\n       \"value\": 0", second = "\"kind\": \"workspace\",\n       \"value\": 1";
  folder.edit("\"offset_bytes\": 256,", "\"offset_bytes\": 0, \"size_bytes\": 24}, {\"offset_bytes\": 256,");
  folder.edit(tensor + "2", second);
  folder.edit(second + between + tensor + "0", second + between + first);
  folder.edit(tensor + "2", first);
  expect(folder.text() + on_fake(), 0, "PASSED");
}

void test_wrong_results() {
  Folder folder("by_hand");
  folder.rewrite("golden.npz", [](std::string& text) { text[text.rfind("NUMPY") - 1 + 128 + 3] ^= 0x40; });
  expect(folder.text() + on_fake(), 1, "nothing was measured: the outputs are wrong");
  Folder unwritten("by_hand");  // the last kernel writes another tensor: the output stays as it was poisoned
  unwritten.edit("\"kind\": \"tensor\",\n       \"value\": 3", "\"kind\": \"tensor\",\n       \"value\": 2");
  expect(unwritten.text() + on_fake(), 1, "inf times that would pass");
}

void test_usage() {
  expect("", 2, "error: wanted a bundle");
  expect("one two", 2, "wanted one bundle, got a second one: two");
  expect("--checked one", 2, "unknown option --checked");
  expect("one --repeats -1", 2, "--repeats: wanted a whole number >= 0, got '-1'");
  expect("one --warmup 99999999999", 2, "--warmup: wanted a whole number");
  expect("one --driver", 2, "--driver: wanted a value");
  expect("one --device emulator", 2, "python -m tvm_fuse.runner --device emulator");
  expect("/no/such/folder", 2, "/no/such/folder: no bundle.json in it");
  expect(data("net") + on_emulator() + "--device 1", 2, "there is no device 1; wanted one below 1");
  expect(data("net") + " --driver '" + emulator + "' --image /no/such/image", 2, "/no/such/image: cannot be read");
}

void test_damage() {
  Folder folder("net");
  folder.edit_file("kernels.cu", "extern", "EXTERN");
  expect(folder.text() + on_emulator(), 3, "kernels.cu: its contents are not those that were exported");
}

void test_driver() {
  expect(data("net") + " --driver libcuda-that-is-not-there.so", 4, "the CUDA driver cannot be loaded");
  expect(data("net") + " --driver '" + kernels + "'", 4, "is no CUDA driver: it lacks cuInit cuDriverGetVersion");
  expect(data("net") + " --driver '" + emulator + "'", 5, "cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE");
  Folder folder("net");
  folder.edit("_nn_softmax_kernel\"", "_nn_softmax_colonel\"");
  folder.edit("\"symbol\": \"tvmgen_default_fused_nn_softmax_kernel\",\n   \"grid\"", "\"symbol\": \"tvmgen_default_fused_nn_softmax_colonel\",\n   \"grid\"");
  expect(folder.text() + on_emulator(), 5, "cuModuleGetFunction (tvmgen_default_fused_nn_softmax_colonel) failed: CUDA_ERROR_NOT_FOUND");
}

struct Failure {
  const char *rule, *message;
  int code;
};
const Failure kFailures[] = {
    {"cuInit:100", "the CUDA driver sees no NVIDIA GPU", 4},
    {"cuInit:999", "the CUDA driver does not start: CUDA_ERROR", 4},
    {"cuMemAlloc_v2:2", "the device is out of memory: 24 more bytes were wanted", 5},
    {"cuMemAlloc_v2:1", "cuMemAlloc_v2 failed: CUDA_ERROR", 5},
    {"cuModuleLoadData:209", "cuModuleLoadData failed", 5},
    {"cuFuncSetAttribute@scale:1", "cuFuncSetAttribute (scale) failed", 5},
    {"cuLaunchKernel@scale:701", "cuLaunchKernel (scale) failed: CUDA_ERROR", 5},
    {"cuCtxSynchronize@scale:719", "cuCtxSynchronize (scale) failed: CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure", 5},
    {"cuCtxPushCurrent_v2:201", "cuCtxPushCurrent_v2 failed", 5},
    {"cuStreamBeginCapture_v2:801", "note: not measured as a CUDA graph: cuStreamBeginCapture_v2 failed", 0},
    {"cuStreamEndCapture:801", "note: not measured as a CUDA graph: cuStreamEndCapture failed", 0},
    {"cuGraphInstantiateWithFlags:801", "note: not measured as a CUDA graph: cuGraphInstantiateWithFlags failed", 0},
};

void test_failures() {
  for (const Failure& row : kFailures) {
    setenv("FAKE_CUDA_FAIL", row.rule, 1);
    expect(data("by_hand") + on_fake() + "--kernels", row.code, row.message);
  }
  unsetenv("FAKE_CUDA_FAIL");
  setenv("FAKE_CUDA_ARCH", "86", 1);
  expect(data("by_hand") + on_fake(), 0, "note: the cubin is for sm_80, the device is sm_86");
  setenv("FAKE_CUDA_ARCH", "120", 1);
  expect(data("by_hand") + on_fake(), 0, "note: no cubin fits sm_120: the driver compiled PTX for sm_80");
  setenv("FAKE_CUDA_ARCH", "70", 1);
  expect(data("by_hand") + on_fake(), 2, "hint: export it with --arch sm_70 as well");
  unsetenv("FAKE_CUDA_ARCH");
}

}  // namespace

int main(int, char** texts) {
  program = texts[1], emulator = texts[2], kernels = texts[3], fake = texts[4];
  test_right_results();
  test_workspaces();
  test_wrong_results();
  test_usage();
  test_damage();
  test_driver();
  test_failures();
  return failures;
}
