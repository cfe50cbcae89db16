// y_t += sum_s <x_t, a_s> g_s for each sample: what factors of earlier steps add to a linear layer, and, with a and g
// exchanged, to its input's gradient. float32.
//
// For few t it is bound by reading a and g, once each from memory: inner products of some lines of a at a time with x,
// then as many lines of g added to y, which stays in the first-level cache.
#pragma once
#include <cstdint>

namespace dpk {

struct LowRankKernels {
  // products[s] = <x, a_s> over n floats
  void (*dots)(const float* x, const float* a, int64_t a_stride, int64_t count, int64_t n, float* products);
  // y += sum_s products[s] g_s over n floats
  void (*add)(float* y, const float* g, int64_t g_stride, int64_t count, int64_t n, const float* products);
};

const LowRankKernels& low_rank_kernels();

}  // namespace dpk
