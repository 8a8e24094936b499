// The textbook kernel: convolution, folded batch norm and ReLU in one pass over the output.
//
//   y[n, o, p, q] = max(0, scale[o] * sum over (c, r, s) of x[n, c, p*S+r-P, q*S+s-P] * w[o, c, r, s] + shift[o])
//
// One thread an output element: it accumulates in a register, scales and shifts, clamps, and stores
// once. Nothing is tiled or shared, so it is a baseline to beat and an oracle to compare with, not a
// kernel to ship. $NAME, $KERNEL, $STRIDE, $PADDING and $THREADS are filled in by tvm_fuse.cuda.reference.
// Source: Ioffe and Szegedy 2015, section 3.1, with the statistics of inference.
extern "C" __global__ void __launch_bounds__($THREADS) $NAME(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ scale, const float* __restrict__ shift, float* __restrict__ y, int batch, int channels, int height, int width, int filters, int out_height, int out_width) {
  int index = ((int)blockIdx.x) * $THREADS + ((int)threadIdx.x);
  if (index >= batch * filters * out_height * out_width) return;
  int q = index % out_width;
  int p = index / out_width % out_height;
  int o = index / (out_width * out_height) % filters;
  int n = index / (out_width * out_height * filters);
  float sum = 0.0f;
  for (int c = 0; c < channels; ++c) {
    for (int r = 0; r < $KERNEL; ++r) {
      for (int s = 0; s < $KERNEL; ++s) {
        int row = p * $STRIDE + r - $PADDING;
        int column = q * $STRIDE + s - $PADDING;
        if (row >= 0 && row < height && column >= 0 && column < width) {
          sum += x[((n * channels + c) * height + row) * width + column] * w[((o * channels + c) * $KERNEL + r) * $KERNEL + s];
        }
      }
    }
  }
  y[index] = max(0.0f, scale[o] * sum + shift[o]);
}
