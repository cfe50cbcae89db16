// The vector code behind conv_each.h.
namespace dpk::DPK_ISA {
namespace conv_each {

#include "simd.h"

constexpr int block = DPK_LANES == 16 ? 8 : 4;  // with three vectors of places, what the registers hold
constexpr int most_vectors = 3;

template <int rows, int vectors>
void tapped_of(const float* weights, const float* in, const Tap* taps, int64_t count, float* out, int64_t out_stride) {
  Floats sum[rows][vectors] = {};
  for (int64_t t = 0; t < count; ++t) {
    const float* from = in + taps[t].input;
    const float* w = weights + taps[t].weight;
    Floats inputs[vectors];
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) inputs[v] = load<Floats>(from + v * lanes);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 3
      for (int v = 0; v < vectors; ++v) sum[m][v] += w[m] * inputs[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) store(out + m * out_stride + v * lanes, sum[m][v]);
  }
}

template <int rows>
void tapped_rows(const float* weights, const float* in, int vectors, const Tap* taps, int64_t count, float* out,
                 int64_t stride) {
  if (vectors == 1) return tapped_of<rows, 1>(weights, in, taps, count, out, stride);
  if (vectors == 2) return tapped_of<rows, 2>(weights, in, taps, count, out, stride);
  tapped_of<rows, 3>(weights, in, taps, count, out, stride);
}

void tapped(const float* weights, int rows, const float* in, int vectors, const Tap* taps, int64_t count, float* out,
            int64_t stride) {
  int m = 0;
  for (; rows - m >= block; m += block) {
    tapped_rows<block>(weights + m, in, vectors, taps, count, out + m * stride, stride);
  }
  for (; rows - m >= 4; m += 4) tapped_rows<4>(weights + m, in, vectors, taps, count, out + m * stride, stride);
  for (; rows - m >= 2; m += 2) tapped_rows<2>(weights + m, in, vectors, taps, count, out + m * stride, stride);
  if (m < rows) tapped_rows<1>(weights + m, in, vectors, taps, count, out + m * stride, stride);
}

constexpr ConvEachKernels table = {block, lanes, most_vectors, tapped};

}  // namespace conv_each
}  // namespace dpk::DPK_ISA
