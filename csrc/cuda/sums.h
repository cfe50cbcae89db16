// Clipped sums over samples on a GPU: two passes over lists of hundreds of tensors, one launch each.
//
//   squares:   partial[b][c] = sum of (now - before)^2 over chunk c of row b                      float64
//   sum:       out[j] = sum_b w_b (now - before)[b][j]       or clamped to [-limit, limit]        float64
//
// The partial squares of a row are added in order by who makes the weights; noise.h adds noise and rounds. Tensors are
// a table of columns, cut into chunks of 4,096 elements of a row. Rows of float32, float64, bfloat16 or float16;
// `before` may be missing, or one row for all samples. Deterministic: a chunk is one block's, added in a fixed order by
// a tree; a sum is one thread's, sample after sample. A sample of weight 0 is left out by selection. 64-bit indices
// throughout. Tiling: a thread of `sum` has 4 elements, 16 apart, so that 32 threads read runs of 64 bytes. Limiter:
// reading the rows, once for each pass; the second one is from the L2 cache where B rows of a chunk fit there.
#pragma once
#include "device.h"

namespace dpk::cuda {

enum class Kind : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

// A tensor of the list; strides are in elements, `first` is its first element in the whole row.
struct Rows {
  const void *now, *before;
  int64_t now_stride, before_stride, length, first;
  Kind kind;
};

struct Chunk {
  int column;
  int64_t start, length;
};

DPK_DEVICE double half_to_double(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
  double value;
  if (exponent == 0) {
    value = fraction * 0x1p-24;
  } else if (exponent == 31) {
    value = fraction ? NAN : INFINITY;
  } else {
    value = ldexp(1.0 + fraction * 0x1p-10, exponent - 15);
  }
  return bits >> 15 ? -value : value;
}

DPK_DEVICE double element(const void* data, Kind kind, int64_t i) {
  if (kind == Kind::f32) return static_cast<double>(static_cast<const float*>(data)[i]);
  if (kind == Kind::f64) return static_cast<const double*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (kind == Kind::f16) return half_to_double(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return static_cast<double>(value);
}

DPK_DEVICE double value_of(const Rows& rows, int64_t sample, int64_t i) {
  const double now = element(rows.now, rows.kind, sample * rows.now_stride + i);
  return rows.before == nullptr ? now : now - element(rows.before, rows.kind, sample * rows.before_stride + i);
}

constexpr int64_t chunk_length = 4096;
constexpr int squares_threads = 256, sum_threads = 256;

// Grid: (chunks, samples up to 65,535 at a time).
DPK_KERNEL partial_squares(const Rows* columns, const Chunk* chunks, int64_t samples, double* partial) {
  DPK_SHARED double sums[warp_size];
  const Chunk chunk = chunks[blockIdx.x];
  const Rows rows = columns[chunk.column];
  for (int64_t sample = blockIdx.y; sample < samples; sample += gridDim.y) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < chunk.length; i += squares_threads) {
      const double x = value_of(rows, sample, chunk.start + i);
      sum += x * x;
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) partial[sample * gridDim.x + blockIdx.x] = sum;
    __syncthreads();
  }
}

// Grid: one block for 1,024 elements of all columns together. `groups` weights a sample: one, or one for each column.
DPK_KERNEL weighted_sums(const Rows* columns, int count, int64_t total, int64_t samples, const double* weights,
                         int groups, double limit, double* out) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * sum_threads + threadIdx.x;
  const int64_t first = thread / 16 * 64 + thread % 16;
  for (int w = 0; w < 4; ++w) {
    const int64_t at = first + 16 * w;
    if (at >= total) return;
    const int column = entry_of(columns, count, at);
    const Rows& rows = columns[column];
    double sum = 0.0;
    for (int64_t b = 0; b < samples; ++b) {
      const double weight = weights[b * groups + (groups > 1 ? column : 0)];
      if (weight == 0.0) continue;
      double x = value_of(rows, b, at - rows.first);
      if (limit >= 0) x = x > limit ? limit : x < -limit ? -limit : x;
      sum += weight * x;
    }
    out[at] = sum;
  }
}

inline void launch_squares(const Rows* columns, const Chunk* chunks, int64_t chunk_count, int64_t samples,
                           double* partial, DPK_STREAM queue) {
  if (chunk_count == 0 || samples == 0) return;
  const dim3 grid(static_cast<unsigned>(chunk_count), static_cast<unsigned>(samples < 65535 ? samples : 65535));
  DPK_LAUNCH(partial_squares, grid, squares_threads, 0, queue, columns, chunks, samples, partial);
}

// A negative limit clamps nothing.
inline void launch_sums(const Rows* columns, int count, int64_t total, int64_t samples, const double* weights,
                        int groups, double limit, double* out, DPK_STREAM queue) {
  const auto blocks = static_cast<unsigned>((total + 4 * sum_threads - 1) / (4 * sum_threads));
  if (blocks == 0) return;
  DPK_LAUNCH(weighted_sums, blocks, sum_threads, 0, queue, columns, count, total, samples, weights, groups, limit, out);
}

}  // namespace dpk::cuda
