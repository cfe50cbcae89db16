// The vector code behind low_rank.h.
namespace dpk::DPK_ISA {
namespace low_rank {

#include "simd.h"

template <int lines>
void dots_of(const float* x, const float* a, int64_t stride, int64_t n, float* products) {
  Floats sum[lines][2] = {};
  int64_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) {
    const Floats first = load<Floats>(x + j), second = load<Floats>(x + j + lanes);
#pragma GCC unroll 4
    for (int s = 0; s < lines; ++s) {
      sum[s][0] += first * load<Floats>(a + s * stride + j);
      sum[s][1] += second * load<Floats>(a + s * stride + j + lanes);
    }
  }
  for (; j + lanes <= n; j += lanes) {
    for (int s = 0; s < lines; ++s) sum[s][0] += load<Floats>(x + j) * load<Floats>(a + s * stride + j);
  }
  for (int s = 0; s < lines; ++s) {
    const Floats total = sum[s][0] + sum[s][1];
    float rest = 0.0f;
    for (int64_t i = j; i < n; ++i) rest += x[i] * a[s * stride + i];
    for (int l = 0; l < lanes; ++l) rest += total[l];
    products[s] = rest;
  }
}

void dots(const float* x, const float* a, int64_t stride, int64_t count, int64_t n, float* products) {
  int64_t s = 0;
  for (; s + 4 <= count; s += 4) dots_of<4>(x, a + s * stride, stride, n, products + s);
  for (; s < count; ++s) dots_of<1>(x, a + s * stride, stride, n, products + s);
}

template <int lines>
void add_of(float* y, const float* g, int64_t stride, int64_t n, const float* products) {
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    Floats sum = load<Floats>(y + j);
#pragma GCC unroll 4
    for (int s = 0; s < lines; ++s) sum += products[s] * load<Floats>(g + s * stride + j);
    store(y + j, sum);
  }
  for (; j < n; ++j) {
    for (int s = 0; s < lines; ++s) y[j] += products[s] * g[s * stride + j];
  }
}

void add(float* y, const float* g, int64_t stride, int64_t count, int64_t n, const float* products) {
  int64_t s = 0;
  for (; s + 4 <= count; s += 4) add_of<4>(y, g + s * stride, stride, n, products + s);
  for (; s < count; ++s) add_of<1>(y, g + s * stride, stride, n, products + s);
}

constexpr LowRankKernels table = {dots, add};

}  // namespace low_rank
}  // namespace dpk::DPK_ISA
