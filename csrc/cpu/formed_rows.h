// What linear layers and convolutions do with the rows that they form, tile by tile (weight_rows.h).
#pragma once
#include <cmath>
#include <vector>

#include "arguments.h"
#include "isa.h"
#include "weight_rows.h"

#if DPK_HAVE_X86_VARIANTS
#include <immintrin.h>
#endif

namespace dpk {

constexpr int64_t streamed_bytes = int64_t{4} << 20;  // larger results are not read again from cache

inline void fence() {
#if DPK_HAVE_X86_VARIANTS
  _mm_sfence();
#endif
}

inline bool many(int64_t floats) { return floats * static_cast<int64_t>(sizeof(float)) >= streamed_bytes; }

// The largest float that is not beyond the bound.
inline float limit_of(double bound) {
  const auto limit = static_cast<float>(bound);
  return static_cast<double>(limit) > bound ? std::nextafter(limit, 0.0f) : limit;
}

inline Tensor sum_of_parts(const std::vector<double>& parts, int64_t batch) {
  Tensor squares = empty(&batch, 1, ScalarType::Double);
  auto* out = squares.mutable_data_ptr<double>();
  const int64_t each = batch ? static_cast<int64_t>(parts.size()) / batch : 0;
  for (int64_t b = 0; b < batch; ++b) {
    out[b] = 0.0;
    for (int64_t i = 0; i < each; ++i) out[b] += parts[static_cast<size_t>(b * each + i)];
  }
  return squares;
}

// Where rows go: nowhere, to memory that is not filled, or, with a scale, onto what is there.
struct Destination {
  float* data = nullptr;
  bool onto = false;
  float scale = 1.0f;

  // Puts lines of a row there, from its element `at` on; their squares, unless they are added onto others.
  double put(const WeightRowKernels& k, const float* tile, int64_t stride, int rows, int64_t width, int64_t at,
             int64_t out_stride, bool past_caches) const {
    float* to = data == nullptr ? nullptr : data + at;
    if (!onto) return k.finish(tile, stride, rows, width, to, out_stride, past_caches);
    k.add(tile, stride, rows, width, scale, to, out_stride);
    return 0.0;
  }
};

// Sums of runs in float64, [N, ...], each of them contiguous.
inline bool are_sums(const Tensor& sums) {
  int64_t stride = 1;
  for (int64_t d = sums.dim() - 1; d > 0; --d) {
    if (sums.size(d) != 1 && sums.stride(d) != stride) return false;
    stride *= sums.size(d);
  }
  return sums.scalar_type() == ScalarType::Double;
}

}  // namespace dpk
