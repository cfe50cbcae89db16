// Norms of rows that stay factors, row_b = sum_t g_bt a_bt^T, by inner products of their addends in float64:
//
//   |row_b|^2 = sum over t, u of <a_t, a_u> <g_t, g_u>,      N_b = sum over t of |a_t| |g_t|
//
// Lines go in blocks of four: the products of two blocks are formed in registers, of each pair of blocks once, and
// multiplied at once, so that no T x T matrix exists. Limit: multiply-add peak in float64, half of T^2 (p + d).
#pragma once
#include <cstdint>

namespace dpk {

constexpr int gram_block = 4;

struct OuterGramKernels {
  void (*widen)(const float* from, int64_t n, double* to);
  // products[i][j] = <x_i, y_j> of four lines each, `stride` apart
  void (*products)(const double* x, const double* y, int64_t stride, int64_t width,
                   double (&products)[gram_block][gram_block]);
};

const OuterGramKernels& outer_gram_kernels();

}  // namespace dpk
