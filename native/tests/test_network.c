/* Networks in static libraries, from C: two of them in one program, from two threads. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "../testdata/net_golden.h"
#include "net.h"
#include "twin.h"

static int failures;

static void check(int holds, const char *what) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "FAILED: %s; the last error is: %s\n", what, net_last_error());
}

static int is_near(const float *got, const float *wanted, int count) {
  for (int i = 0; i < count; ++i)
    if (!(fabsf(got[i] - wanted[i]) <= 1e-5f + 1e-5f * fabsf(wanted[i]))) return 0;
  return 1;
}

static void *run_often(void *ok) {
  float classes[NET_OUT_CLASSES_ELEMENTS], scores[NET_OUT_SCORES_ELEMENTS];
  for (int i = 0; i < 20; ++i) {
    memset(classes, 0, sizeof classes);
    if (net_run(golden_image, classes, scores) != 0 || !is_near(classes, golden_classes, 3)) *(int *)ok = 0;
  }
  return NULL;
}

int main(int count, char **texts) {
  if (count != 2) return 2;
  float classes[3] = {0}, scores[3] = {0};
  check(NET_IN_IMAGE_ELEMENTS == 72, "elements of the input");
  /* The first run opens GPU 0: there is none here, or one that cannot load what is made for the emulator. */
  const int status = net_run(golden_image, classes, scores);
  check(status == 4 || status == 5, "run without init");
  check(net_init(0, "libcuda-that-is-not-there.so") == 4, "without a driver");
  check(strstr(net_last_error(), "the CUDA driver cannot be loaded") != NULL, "what it says then");
  check(net_init(5, texts[1]) == 2, "without such a device");

  check(net_init(0, texts[1]) == 0, "init");
  check(net_init(0, texts[1]) == 2, "init twice");
  check(strstr(net_last_error(), "net: it is initialised already; free it first") != NULL, "what it says then");
  check(net_run(golden_image, classes, scores) == 0, "run");
  check(is_near(classes, golden_classes, 3) && is_near(scores, golden_scores, 3), "the outputs are golden");
  check(net_run(NULL, classes, scores) == 2, "without an input");
  check(strstr(net_last_error(), "'image': the address is NULL") != NULL, "what it says then");
  check(net_run(golden_image, classes, NULL) == 2, "without an output");

  check(twin_init(0, texts[1]) == 0, "init of the other");
  memset(classes, 0, sizeof classes);
  check(twin_run(golden_image, classes, scores) == 0 && is_near(classes, golden_classes, 3), "run the other");

  int ok[2] = {1, 1};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, run_often, &ok[i]);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  check(ok[0] && ok[1], "two threads");

  net_free();
  net_free();
  check(net_init(0, texts[1]) == 0 && net_run(golden_image, classes, scores) == 0, "again after free");
  net_free();
  twin_free();
  return failures;
}
