// The vector code behind norm_rows.h.
namespace dpk::DPK_ISA {
namespace norm_rows {

#include "simd.h"

constexpr int unroll = 4;

// The sum over i < n of f(i), f giving a vector or, for the rest, a single float; in fixed order.
template <class Vector, class Single>
inline float sum_over(int64_t n, const Vector& vector, const Single& single) {
  Floats sum[unroll] = {};
  int64_t i = 0;
  for (; i + unroll * lanes <= n; i += unroll * lanes) {
#pragma GCC unroll 4
    for (int u = 0; u < unroll; ++u) sum[u] += vector(i + u * lanes);
  }
  for (; i + lanes <= n; i += lanes) sum[0] += vector(i);
  float rest = 0.0f;
  for (; i < n; ++i) rest += single(i);
  const Floats total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (int l = 0; l < lanes; ++l) rest += total[l];
  return rest;
}

struct Statistics {
  float mean, inverse_deviation;
};

inline Statistics statistics(const float* x, int64_t n, float epsilon) {
  const auto count = static_cast<float>(n);
  const float mean =
      sum_over(n, [&](int64_t i) { return load<Floats>(x + i); }, [&](int64_t i) { return x[i]; }) / count;
  const float variance = sum_over(
                             n,
                             [&](int64_t i) {
                               const Floats d = load<Floats>(x + i) - mean;
                               return d * d;
                             },
                             [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) /
                         count;
  return {mean, 1.0f / __builtin_sqrtf(variance + epsilon)};
}

void over_last(const float* x, const float* g, int64_t count, int64_t width, float epsilon, float* scale,
               float* shift) {
  for (int64_t j = 0; j < width; ++j) scale[j] = shift[j] = 0.0f;
  for (int64_t t = 0; t < count; ++t, x += width, g += width) {
    const Statistics s = statistics(x, width, epsilon);
    int64_t j = 0;
    for (; j + lanes <= width; j += lanes) {
      const Floats grad = load<Floats>(g + j), value = (load<Floats>(x + j) - s.mean) * s.inverse_deviation;
      store(scale + j, load<Floats>(scale + j) + grad * value);
      store(shift + j, load<Floats>(shift + j) + grad);
    }
    for (; j < width; ++j) {
      scale[j] += g[j] * ((x[j] - s.mean) * s.inverse_deviation);
      shift[j] += g[j];
    }
  }
}

void over_channels(const float* x, const float* g, int64_t channels, int64_t places, float epsilon, float* scale,
                   float* shift) {
  const Statistics s = statistics(x, channels * places, epsilon);
  for (int64_t c = 0; c < channels; ++c, x += places, g += places) {
    shift[c] = sum_over(places, [&](int64_t i) { return load<Floats>(g + i); }, [&](int64_t i) { return g[i]; });
    scale[c] = s.inverse_deviation *
               sum_over(
                   places, [&](int64_t i) { return load<Floats>(g + i) * (load<Floats>(x + i) - s.mean); },
                   [&](int64_t i) { return g[i] * (x[i] - s.mean); });
  }
}

constexpr NormRowKernels table = {over_last, over_channels};

}  // namespace norm_rows
}  // namespace dpk::DPK_ISA
