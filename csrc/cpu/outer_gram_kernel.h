// The vector code behind outer_gram.h.
namespace dpk::DPK_ISA {
namespace outer_gram {

#include "simd.h"

void widen(const float* from, int64_t n, double* to) {
  int64_t i = 0;
  for (; i + double_lanes <= n; i += double_lanes) store(to + i, widen_floats(load<HalfFloats>(from + i)));
  for (; i < n; ++i) to[i] = from[i];
}

void products(const double* x, const double* y, int64_t stride, int64_t width,
              double (&products)[gram_block][gram_block]) {
  Doubles sum[gram_block][gram_block] = {};
  int64_t k = 0;
  for (; k + double_lanes <= width; k += double_lanes) {
    Doubles b[gram_block];
#pragma GCC unroll 4
    for (int j = 0; j < gram_block; ++j) b[j] = load<Doubles>(y + j * stride + k);
#pragma GCC unroll 4
    for (int i = 0; i < gram_block; ++i) {
      const Doubles a = load<Doubles>(x + i * stride + k);
#pragma GCC unroll 4
      for (int j = 0; j < gram_block; ++j) sum[i][j] += a * b[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < gram_block; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < gram_block; ++j) {
      double total = 0.0;
      for (int l = 0; l < double_lanes; ++l) total += sum[i][j][l];
      for (int64_t rest = k; rest < width; ++rest) total += x[i * stride + rest] * y[j * stride + rest];
      products[i][j] = total;
    }
  }
}

constexpr OuterGramKernels table = {widen, products};

}  // namespace outer_gram
}  // namespace dpk::DPK_ISA
