// The vector code behind linear_runs.h.
namespace dpk::DPK_ISA {
namespace linear_runs {

#include "simd.h"

template <int lines, int outputs>
void product_of(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t width, float* y,
                int64_t y_stride) {
  Floats sum[lines][outputs] = {};
  int64_t j = 0;
  for (; j + lanes <= width; j += lanes) {
    Floats weights[outputs];
#pragma GCC unroll 4
    for (int o = 0; o < outputs; ++o) weights[o] = load<Floats>(w + o * w_stride + j);
#pragma GCC unroll 4
    for (int l = 0; l < lines; ++l) {
      const Floats input = load<Floats>(x + l * x_stride + j);
#pragma GCC unroll 4
      for (int o = 0; o < outputs; ++o) sum[l][o] += input * weights[o];
    }
  }
  for (int l = 0; l < lines; ++l) {
    for (int o = 0; o < outputs; ++o) {
      float rest = 0.0f;
      for (int64_t i = j; i < width; ++i) rest += x[l * x_stride + i] * w[o * w_stride + i];
      y[l * y_stride + o] = sum_of_lanes(sum[l][o]) + rest;
    }
  }
}

template <int lines>
void product_of_lines(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t height, int64_t width,
                      float* y) {
  int64_t o = 0;
  for (; o + 4 <= height; o += 4) product_of<lines, 4>(x, x_stride, w + o * w_stride, w_stride, width, y + o, height);
  for (; o + 2 <= height; o += 2) product_of<lines, 2>(x, x_stride, w + o * w_stride, w_stride, width, y + o, height);
  if (o < height) product_of<lines, 1>(x, x_stride, w + o * w_stride, w_stride, width, y + o, height);
}

void product(const float* x, int64_t x_stride, int64_t lines, const float* w, int64_t w_stride, int64_t height,
             int64_t width, float* y) {
  int64_t l = 0;
  for (; l + 4 <= lines; l += 4)
    product_of_lines<4>(x + l * x_stride, x_stride, w, w_stride, height, width, y + l * height);
  for (; l < lines; ++l) product_of_lines<1>(x + l * x_stride, x_stride, w, w_stride, height, width, y + l * height);
}

float fault(const float* x, int64_t n) {
  Floats sum[2] = {};
  int64_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) {
    sum[0] += load<Floats>(x + j) * 0.0f;
    sum[1] += load<Floats>(x + j + lanes) * 0.0f;
  }
  float rest = sum_of_lanes(sum[0] + sum[1]);
  for (; j < n; ++j) rest += x[j] * 0.0f;
  return rest;
}

constexpr LinearRunKernels table = {product, fault};

}  // namespace linear_runs
}  // namespace dpk::DPK_ISA
