/* Runs bundles of `tvm-fuse export` with the CUDA driver alone: no Python, no TVM, no CUDA toolkit.
 *
 *     tvm_fuse_network *network = NULL;
 *     if (tvm_fuse_open("mobilenet_v2-bundle", NULL, &network) != TVM_FUSE_OK) fail(tvm_fuse_last_error());
 *     tvm_fuse_set_input(network, 0, image, sizeof image);
 *     tvm_fuse_run(network);
 *     tvm_fuse_get_output(network, 0, scores, sizeof scores);
 *     tvm_fuse_close(network);
 *
 * Every function that can fail returns a tvm_fuse_status; what, where, wanted and got is then in
 * tvm_fuse_last_error(). No C++ exception leaves the library.
 *
 * Threads: different networks may be used by different threads at the same time. One network is used by one
 * thread at a time, any thread; the caller sees to that. The CUDA context is the device's primary one, and
 * is current during a call only: what was current before is current again.
 *
 * After a kernel failed, CUDA refuses all further work in the process: close everything and start again.
 */
#ifndef TVM_FUSE_RUNNER_H
#define TVM_FUSE_RUNNER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TVM_FUSE_API __attribute__((visibility("default")))
#else
#define TVM_FUSE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers are the exit codes of tvm-fuse-run. */
typedef enum tvm_fuse_status {
  TVM_FUSE_OK = 0,
  TVM_FUSE_USAGE = 2,       /* an argument is wrong, there is no such device, or no machine code for it */
  TVM_FUSE_BUNDLE = 3,      /* the bundle is damaged, or of another version */
  TVM_FUSE_NO_DEVICE = 4,   /* no driver, or no GPU */
  TVM_FUSE_FAILED = 5,      /* the driver or a kernel failed */
  TVM_FUSE_INTERNAL = 70    /* a bug of this library, or no host memory */
} tvm_fuse_status;

/* A bundle on a device. */
typedef struct tvm_fuse_network tvm_fuse_network;

/* Zeroed or NULL: device 0, libcuda.so.1, the machine code that fits the device. */
typedef struct tvm_fuse_options {
  int device;         /* number of the GPU, from 0 */
  const char *driver; /* file of the CUDA driver, or a name for the loader; NULL: libcuda.so.1 */
  const char *image;  /* file with the kernels, in place of the bundle's; NULL: the bundle's */
} tvm_fuse_options;

/* An input or an output. All pointers live as long as the network. */
typedef struct tvm_fuse_port {
  const char *name;     /* UTF-8 */
  const char *dtype;    /* as NumPy spells it: float32, int64, bool ... */
  const int64_t *shape; /* `rank` sizes; elements lie in C order, without gaps */
  size_t rank;
  size_t size_bytes;    /* of all elements */
} tvm_fuse_port;

/* Reads and checks a bundle (sizes and SHA-256 of all its files), and loads kernels and weights.
 * On failure *network is NULL. */
TVM_FUSE_API int tvm_fuse_open(const char *folder, const tvm_fuse_options *options, tvm_fuse_network **network);

/* Frees all memory of a network; NULL is allowed. */
TVM_FUSE_API void tvm_fuse_close(tvm_fuse_network *network);

/* 0 for NULL. */
TVM_FUSE_API size_t tvm_fuse_input_count(const tvm_fuse_network *network);
TVM_FUSE_API size_t tvm_fuse_output_count(const tvm_fuse_network *network);

/* Describes an input or an output, numbered from 0 in the model's order. */
TVM_FUSE_API int tvm_fuse_input(const tvm_fuse_network *network, size_t index, tvm_fuse_port *port);
TVM_FUSE_API int tvm_fuse_output(const tvm_fuse_network *network, size_t index, tvm_fuse_port *port);

/* Copies an input to the device, where it stays until it is set again. `size_bytes` must be the port's. */
TVM_FUSE_API int tvm_fuse_set_input(tvm_fuse_network *network, size_t index, const void *data, size_t size_bytes);

/* Computes all outputs, and waits for them: as one CUDA graph where the driver can make one. An input that was
 * never set is an error. */
TVM_FUSE_API int tvm_fuse_run(tvm_fuse_network *network);

/* Copies an output from the device; an error before the first run. `size_bytes` must be the port's. */
TVM_FUSE_API int tvm_fuse_get_output(tvm_fuse_network *network, size_t index, void *data, size_t size_bytes);

/* What the last failed call on this thread had to say; valid until the next failure on it. Never NULL. */
TVM_FUSE_API const char *tvm_fuse_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
