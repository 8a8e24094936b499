
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 700)
#define __shfl_sync(mask, var, lane, width) \
        __shfl((var), (lane), (width))

#define __shfl_down_sync(mask, var, offset, width) \
        __shfl_down((var), (offset), (width))

#define __shfl_up_sync(mask, var, offset, width) \
        __shfl_up((var), (offset), (width))
#endif


#if (((__CUDACC_VER_MAJOR__ == 11) && (__CUDACC_VER_MINOR__ >= 4)) || \
     (__CUDACC_VER_MAJOR__ > 11))
#define TVM_ENABLE_L2_PREFETCH 1
#else
#define TVM_ENABLE_L2_PREFETCH 0
#endif

#ifdef _WIN32
  using uint = unsigned int;
  using uchar = unsigned char;
  using ushort = unsigned short;
  using int64_t = long long;
  using uint64_t = unsigned long long;
#else
  #define uint unsigned int
  #define uchar unsigned char
  #define ushort unsigned short
  #define int64_t long long
  #define uint64_t unsigned long long
#endif

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800) 
#define TVM_ENBALE_EFFICIENT_SMEM_PTR_CAST 1
#else
#define TVM_ENBALE_EFFICIENT_SMEM_PTR_CAST 0
#endif
extern "C" __global__ void __launch_bounds__(144) tvmgen_default_fused_nn_conv2d_add_nn_relu_kernel(float* __restrict__ T_relu, float* __restrict__ p0, float* __restrict__ p1, float* __restrict__ p2);
extern "C" __global__ void __launch_bounds__(256) tvmgen_default_fused_nn_softmax_kernel(float* __restrict__ T_softmax_norm, float* __restrict__ p0);
extern "C" __global__ void __launch_bounds__(32) tvmgen_default_fused_nn_global_avg_pool2d_kernel(float* __restrict__ T_divide, float* __restrict__ p0);
extern "C" __global__ void __launch_bounds__(256) tvmgen_default_fused_nn_dense_add_kernel(float* __restrict__ T_add, float* __restrict__ p0, float* __restrict__ p1, float* __restrict__ p2);
extern "C" __global__ void __launch_bounds__(4) tvmgen_default_fused_nn_batch_flatten_kernel(float* __restrict__ p0, float* __restrict__ tensor);
extern "C" __global__ void __launch_bounds__(144) tvmgen_default_fused_nn_conv2d_add_nn_relu_kernel(float* __restrict__ T_relu, float* __restrict__ p0, float* __restrict__ p1, float* __restrict__ p2) {
  float product[1];
  __shared__ float product_left[160];
  __shared__ float product_right[324];
  float product_left_local[1];
  product[0] = 0.000000e+00f;
  float condval;
  if ((((int)threadIdx.y) < 4)) {
    condval = p1[((((int)threadIdx.y) * 18) + ((int)threadIdx.x))];
  } else {
    condval = 0.000000e+00f;
  }
  product_left[((((int)threadIdx.y) * 20) + ((int)threadIdx.x))] = condval;
  float condval_1;
  if (((((1 <= (((((int)blockIdx.x) * 3) + (((int)threadIdx.x) / 6)) + (((int)threadIdx.y) / 3))) && ((((((int)blockIdx.x) * 3) + (((int)threadIdx.x) / 6)) + (((int)threadIdx.y) / 3)) < 7)) && (1 <= ((((int)threadIdx.x) % 6) + (((int)threadIdx.y) % 3)))) && (((((int)threadIdx.x) % 6) + (((int)threadIdx.y) % 3)) < 7))) {
    condval_1 = p0[(((((((int)blockIdx.x) * 18) + ((((int)threadIdx.y) / 3) * 6)) + ((int)threadIdx.x)) + (((int)threadIdx.y) % 3)) - 7)];
  } else {
    condval_1 = 0.000000e+00f;
  }
  product_right[((((int)threadIdx.y) * 18) + ((int)threadIdx.x))] = condval_1;
  float condval_2;
  if (((((1 <= (((((int)blockIdx.x) * 3) + (((int)threadIdx.x) / 6)) + (((((int)threadIdx.y) + 8) % 9) / 3))) && ((((((int)blockIdx.x) * 3) + (((int)threadIdx.x) / 6)) + (((((int)threadIdx.y) + 8) % 9) / 3)) < 7)) && (1 <= ((((int)threadIdx.x) % 6) + ((((int)threadIdx.y) + 2) % 3)))) && (((((int)threadIdx.x) % 6) + ((((int)threadIdx.y) + 2) % 3)) < 7))) {
    condval_2 = p0[((((((((((int)threadIdx.y) + 8) / 9) * 36) + (((int)blockIdx.x) * 18)) + ((((((int)threadIdx.y) + 8) % 9) / 3) * 6)) + ((int)threadIdx.x)) + ((((int)threadIdx.y) + 2) % 3)) - 7)];
  } else {
    condval_2 = 0.000000e+00f;
  }
  product_right[(((((int)threadIdx.y) * 18) + ((int)threadIdx.x)) + 144)] = condval_2;
  if (((int)threadIdx.y) < 2) {
    float condval_3;
    if ((((((((int)blockIdx.x) * 3) + (((int)threadIdx.x) / 6)) + ((((int)threadIdx.y) + 7) / 3)) < 7) && ((((int)threadIdx.y) + (((int)threadIdx.x) % 6)) < 6))) {
      condval_3 = p0[((((((((((int)threadIdx.y) + 16) / 9) * 36) + (((int)blockIdx.x) * 18)) + (((((int)threadIdx.y) + 7) / 3) * 6)) + ((int)threadIdx.x)) + ((int)threadIdx.y)) - 6)];
    } else {
      condval_3 = 0.000000e+00f;
    }
    product_right[(((((int)threadIdx.y) * 18) + ((int)threadIdx.x)) + 288)] = condval_3;
  }
  __syncthreads();
  for (int term_inner_outer_outer = 0; term_inner_outer_outer < 2; ++term_inner_outer_outer) {
    product_left_local[0] = product_left[((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9))];
    product[0] = (product[0] + (product_left_local[0] * product_right[((term_inner_outer_outer * 162) + ((int)threadIdx.x))]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 1)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 18)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 2)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 36)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 3)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 54)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 4)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 72)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 5)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 90)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 6)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 108)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 7)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 126)]));
    product_left_local[0] = product_left[(((((int)threadIdx.y) * 20) + (term_inner_outer_outer * 9)) + 8)];
    product[0] = (product[0] + (product_left_local[0] * product_right[(((term_inner_outer_outer * 162) + ((int)threadIdx.x)) + 144)]));
  }
  if (((int)threadIdx.y) < 4) {
    T_relu[(((((int)threadIdx.y) * 36) + (((int)blockIdx.x) * 18)) + ((int)threadIdx.x))] = max((product[0] + p2[((int)threadIdx.y)]), 0.000000e+00f);
  }
}

extern "C" __global__ void __launch_bounds__(256) tvmgen_default_fused_nn_softmax_kernel(float* __restrict__ T_softmax_norm, float* __restrict__ p0) {
  float T_softmax_maxelem[1];
  float T_softmax_expsum[1];
  T_softmax_maxelem[0] = -3.402823e+38f;
  for (int k = 0; k < 3; ++k) {
    if (((int)threadIdx.x) < 3) {
      T_softmax_maxelem[0] = max(T_softmax_maxelem[0], p0[k]);
    }
  }
  T_softmax_expsum[0] = 0.000000e+00f;
  for (int k_1 = 0; k_1 < 3; ++k_1) {
    if (((int)threadIdx.x) < 3) {
      T_softmax_expsum[0] = (T_softmax_expsum[0] + __expf((p0[k_1] - T_softmax_maxelem[0])));
    }
  }
  if (((int)threadIdx.x) < 3) {
    T_softmax_norm[((int)threadIdx.x)] = (__expf((p0[((int)threadIdx.x)] - T_softmax_maxelem[0])) / T_softmax_expsum[0]);
  }
}

extern "C" __global__ void __launch_bounds__(32) tvmgen_default_fused_nn_global_avg_pool2d_kernel(float* __restrict__ T_divide, float* __restrict__ p0) {
  float p0_red_rf[1];
  float red_buf0[1];
  __shared__ float p0_red_repl_rf[1];
  float p0_red[1];
  p0_red_rf[0] = 0.000000e+00f;
  for (int k2_k3_fused_outer = 0; k2_k3_fused_outer < 2; ++k2_k3_fused_outer) {
    if ((((k2_k3_fused_outer * 8) + (((int)threadIdx.x) >> 2)) < 9) && (((k2_k3_fused_outer * 8) + (((int)threadIdx.x) >> 2)) < 9)) {
      p0_red_rf[0] = (p0_red_rf[0] + p0[(((((int)blockIdx.x) * 36) + (k2_k3_fused_outer * 32)) + ((int)threadIdx.x))]);
    }
  }
  uint mask[1];
  float t0[1];
  red_buf0[0] = p0_red_rf[0];
  mask[0] = __activemask();
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 16, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 8, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 4, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 2, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 1, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  red_buf0[0] = __shfl_sync(mask[0], red_buf0[0], 0, 32);
  if (((int)threadIdx.x) == 0) {
    p0_red_repl_rf[0] = red_buf0[0];
  }
  p0_red[0] = 0.000000e+00f;
  __syncthreads();
  p0_red[0] = (p0_red[0] + p0_red_repl_rf[0]);
  if (((int)threadIdx.x) == 0) {
    T_divide[((int)blockIdx.x)] = (p0_red[0] * 2.777778e-02f);
  }
}

extern "C" __global__ void __launch_bounds__(256) tvmgen_default_fused_nn_dense_add_kernel(float* __restrict__ T_add, float* __restrict__ p0, float* __restrict__ p1, float* __restrict__ p2) {
  float product_rf[1];
  float red_buf0[1];
  product_rf[0] = 0.000000e+00f;
  if (((int)threadIdx.y) < 3) {
    if (((int)threadIdx.x) < 4) {
      product_rf[0] = (product_rf[0] + (p1[((((int)threadIdx.y) * 4) + ((int)threadIdx.x))] * p0[((int)threadIdx.x)]));
    }
  }
  uint mask[1];
  float t0[1];
  red_buf0[0] = product_rf[0];
  mask[0] = __activemask();
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 16, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 8, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 4, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 2, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 1, 32);
  red_buf0[0] = (red_buf0[0] + t0[0]);
  red_buf0[0] = __shfl_sync(mask[0], red_buf0[0], (((int)threadIdx.y) * 32), 32);
  if (((int)threadIdx.y) < 3) {
    if (((int)threadIdx.x) == 0) {
      T_add[((int)threadIdx.y)] = (red_buf0[0] + p2[((int)threadIdx.y)]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(4) tvmgen_default_fused_nn_batch_flatten_kernel(float* __restrict__ p0, float* __restrict__ tensor) {
  tensor[((int)threadIdx.x)] = p0[((int)threadIdx.x)];
}

