/* The C API, from C: on the emulator, and on the stand-in that makes graphs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../testdata/net_golden.h"
#include "tvm_fuse/runner.h"

static int failures;

static void check(int holds, const char *what) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "FAILED: %s; the last error is: %s\n", what, tvm_fuse_last_error());
}

static void check_fails(int status, int wanted, const char *text) {
  check(status == wanted, text);
  check(strstr(tvm_fuse_last_error(), text) != NULL, text);
}

static int is_near(const float *got, const float *wanted, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (!(fabsf(got[i] - wanted[i]) <= 1e-5f + 1e-5f * fabsf(wanted[i]))) return 0;
  return 1;
}

static void test_network(tvm_fuse_options options) {
  tvm_fuse_network *network = NULL;
  check(tvm_fuse_open(TVM_FUSE_TESTDATA "/net", &options, &network) == TVM_FUSE_OK, "open");
  check(tvm_fuse_input_count(network) == 1 && tvm_fuse_output_count(network) == 2, "counts");
  tvm_fuse_port port;
  check(tvm_fuse_input(network, 0, &port) == TVM_FUSE_OK, "describe an input");
  check(strcmp(port.name, "image") == 0 && strcmp(port.dtype, "float32") == 0, "its name and dtype");
  check(port.rank == 4 && port.shape[1] == 2 && port.size_bytes == sizeof golden_image, "its shape");
  check(tvm_fuse_output(network, 1, &port) == TVM_FUSE_OK && strcmp(port.name, "scores") == 0, "describe an output");
  check_fails(tvm_fuse_output(network, 2, &port), TVM_FUSE_USAGE, "net: there is no output 2 of 2");
  check_fails(tvm_fuse_output(network, 1, NULL), TVM_FUSE_USAGE, "the port is NULL");

  float classes[3], scores[3];
  check_fails(tvm_fuse_run(network), TVM_FUSE_USAGE, "'image': the input was never set");
  check_fails(tvm_fuse_get_output(network, 0, classes, sizeof classes), TVM_FUSE_USAGE, "nothing was run yet");
  check_fails(tvm_fuse_set_input(network, 0, golden_image, 4), TVM_FUSE_USAGE,
              "'image': wanted 288 bytes (float32[1, 2, 6, 6]), got 4");
  check_fails(tvm_fuse_set_input(network, 0, NULL, sizeof golden_image), TVM_FUSE_USAGE, "the address is NULL");
  check_fails(tvm_fuse_set_input(network, 1, golden_image, 4), TVM_FUSE_USAGE, "no input 1 of 1");

  check(tvm_fuse_set_input(network, 0, golden_image, sizeof golden_image) == TVM_FUSE_OK, "set an input");
  for (int i = 0; i < 3; ++i) {
    check(tvm_fuse_run(network) == TVM_FUSE_OK, "run");
    check(tvm_fuse_get_output(network, 0, classes, sizeof classes) == TVM_FUSE_OK, "get classes");
    check(tvm_fuse_get_output(network, 1, scores, sizeof scores) == TVM_FUSE_OK, "get scores");
    check(is_near(classes, golden_classes, 3) && is_near(scores, golden_scores, 3), "the outputs are golden");
    memset(classes, 0, sizeof classes);
  }
  tvm_fuse_close(network);
}

/* y = (x + 1) w / 2 with w = -1, -0.6 ... 1: other inputs give other outputs, in launches and in a graph. */
static void test_graph(tvm_fuse_options options) {
  tvm_fuse_network *network = NULL;
  check(tvm_fuse_open(TVM_FUSE_TESTDATA "/by_hand", &options, &network) == TVM_FUSE_OK, "open by hand");
  for (int run = 0; run < 3; ++run) {
    float x[6], y[6], wanted[6];
    for (int i = 0; i < 6; ++i) {
      x[i] = (float)(run * 10 + i);
      wanted[i] = (x[i] + 1) * (-1.0f + 0.4f * (float)i) / 2;
    }
    check(tvm_fuse_set_input(network, 0, x, sizeof x) == TVM_FUSE_OK, "set x");
    check(tvm_fuse_run(network) == TVM_FUSE_OK, "run by hand");
    check(tvm_fuse_get_output(network, 0, y, sizeof y) == TVM_FUSE_OK, "get y");
    check(is_near(y, wanted, 6), "y");
  }
  setenv("FAKE_CUDA_FAIL", "cuGraphLaunch:719", 1); /* by now it is a graph that runs */
  check_fails(tvm_fuse_run(network), TVM_FUSE_FAILED, "cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED");
  tvm_fuse_close(network);

  setenv("FAKE_CUDA_FAIL", "cuStreamBeginCapture_v2:801", 1); /* launches do as well */
  check(tvm_fuse_open(TVM_FUSE_TESTDATA "/by_hand", &options, &network) == TVM_FUSE_OK, "open without graphs");
  const float x[6] = {0};
  check(tvm_fuse_set_input(network, 0, x, sizeof x) == TVM_FUSE_OK, "set x without graphs");
  check(tvm_fuse_run(network) == TVM_FUSE_OK && tvm_fuse_run(network) == TVM_FUSE_OK, "run without graphs");
  tvm_fuse_close(network);
  unsetenv("FAKE_CUDA_FAIL");
}

static void test_refusals(tvm_fuse_options options) {
  tvm_fuse_network *network = (tvm_fuse_network *)&options;
  check_fails(tvm_fuse_open("/no/such/folder", &options, &network), TVM_FUSE_USAGE, "no bundle.json in it");
  check(network == NULL, "a network that could not be opened is NULL");
  check_fails(tvm_fuse_open(NULL, &options, &network), TVM_FUSE_USAGE, "the folder is NULL");
  check_fails(tvm_fuse_open("x", NULL, NULL), TVM_FUSE_USAGE, "it is NULL");
  check_fails(tvm_fuse_run(NULL), TVM_FUSE_USAGE, "the network is NULL");
  check(tvm_fuse_input_count(NULL) == 0, "nothing has no inputs");
  tvm_fuse_close(NULL);
  options.device = -1;
  check_fails(tvm_fuse_open(TVM_FUSE_TESTDATA "/net", &options, &network), TVM_FUSE_USAGE, "there is no device -1");
  options.driver = "libcuda-that-is-not-there.so";
  check_fails(tvm_fuse_open(TVM_FUSE_TESTDATA "/net", &options, &network), TVM_FUSE_NO_DEVICE, "cannot be loaded");
}

int main(int count, char **texts) {
  if (count != 4) return 2;
  const tvm_fuse_options emulated = {0, texts[1], texts[2]}, fake = {0, texts[3], NULL};
  test_network(emulated);
  test_graph(fake);
  test_refusals(emulated);
  return failures;
}
