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

// dx[i] = g[i] * by_g - offset - (x[i] - mean) * by_x
inline void input_gradient(const float* x, const float* g, int64_t n, float by_g, float offset, float by_x, float mean,
                           float* dx) {
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    store(dx + i, load<Floats>(g + i) * by_g - offset - (load<Floats>(x + i) - mean) * by_x);
  }
  for (; i < n; ++i) dx[i] = g[i] * by_g - offset - (x[i] - mean) * by_x;
}

void over_last(const float* x, const float* g, const float* w, int64_t count, int64_t width, float epsilon, float* dx,
               float* scale, float* shift) {
  for (int64_t j = 0; j < width; ++j) scale[j] = shift[j] = 0.0f;
  for (int64_t t = 0; t < count; ++t, x += width, g += width) {
    const Statistics s = statistics(x, width, epsilon);
    const float inverse = s.inverse_deviation;
    Floats sum = {}, product = {};
    float sum_rest = 0.0f, product_rest = 0.0f;
    int64_t j = 0;
    for (; j + lanes <= width; j += lanes) {
      const Floats grad = load<Floats>(g + j), value = (load<Floats>(x + j) - s.mean) * inverse;
      store(scale + j, load<Floats>(scale + j) + grad * value);
      store(shift + j, load<Floats>(shift + j) + grad);
      const Floats weighted = w == nullptr ? grad : grad * load<Floats>(w + j);
      sum += weighted;
      product += weighted * value;
    }
    for (; j < width; ++j) {
      const float value = (x[j] - s.mean) * inverse, weighted = w == nullptr ? g[j] : g[j] * w[j];
      scale[j] += g[j] * value;
      shift[j] += g[j];
      sum_rest += weighted;
      product_rest += weighted * value;
    }
    if (dx == nullptr) continue;
    for (int l = 0; l < lanes; ++l) sum_rest += sum[l], product_rest += product[l];
    const auto n = static_cast<float>(width);
    const float offset = inverse * sum_rest / n, by_x = inverse * inverse * product_rest / n;
    float* to = dx + t * width;
    for (j = 0; j + lanes <= width; j += lanes) {
      const Floats grad = load<Floats>(g + j), weighted = w == nullptr ? grad : grad * load<Floats>(w + j);
      store(to + j, weighted * inverse - offset - (load<Floats>(x + j) - s.mean) * by_x);
    }
    for (; j < width; ++j) {
      to[j] = (w == nullptr ? g[j] : g[j] * w[j]) * inverse - offset - (x[j] - s.mean) * by_x;
    }
  }
}

void over_channels(const float* x, const float* g, const float* w, int64_t channels, int64_t places, float epsilon,
                   float* dx, float* scale, float* shift) {
  const Statistics s = statistics(x, channels * places, epsilon);
  const float inverse = s.inverse_deviation;
  float sum = 0.0f, product = 0.0f;
  for (int64_t c = 0; c < channels; ++c) {
    const float *in = x + c * places, *grad = g + c * places;
    shift[c] = sum_over(places, [&](int64_t i) { return load<Floats>(grad + i); }, [&](int64_t i) { return grad[i]; });
    scale[c] =
        inverse * sum_over(
                      places, [&](int64_t i) { return load<Floats>(grad + i) * (load<Floats>(in + i) - s.mean); },
                      [&](int64_t i) { return grad[i] * (in[i] - s.mean); });
    sum += (w == nullptr ? 1.0f : w[c]) * shift[c];
    product += (w == nullptr ? 1.0f : w[c]) * scale[c];
  }
  if (dx == nullptr) return;
  const auto n = static_cast<float>(channels * places);
  const float offset = inverse * sum / n, by_x = inverse * inverse * product / n;
  for (int64_t c = 0; c < channels; ++c) {
    const float by_g = inverse * (w == nullptr ? 1.0f : w[c]);
    input_gradient(x + c * places, g + c * places, places, by_g, offset, by_x, s.mean, dx + c * places);
  }
}

constexpr NormRowKernels table = {over_last, over_channels};

}  // namespace norm_rows
}  // namespace dpk::DPK_ISA
