// Norms of embedding rows on a GPU: lines with equal ids are one line of the row, added up first.
//
//   |row_b|^2 = sum over the distinct ids of sample b of | sum_(t: id_t = id) g_bt |^2,   ids [B, T], g [B, T, d]
//
// `link_ids` finds for each line the next one with the same id, and which lines are the first with theirs; a warp then
// walks the chain of each first line, its lanes over the columns. Lines of float32, sums in float64, in a fixed order:
// a block has 64 lines of one sample, and `coefficients` adds the blocks up. Limiter: reading g once; linking reads T /
// 2 ids a line from the first-level cache.
#pragma once
#include "device.h"

namespace dpk::cuda {

constexpr int link_threads = 256, lookup_threads = 256, lookup_lines = 64;

// next[b][t]: twice the next line with the same id, or of none twice T; plus 1 where t is not the first with its id.
// Grid: (T / 256, samples up to 65,535 at a time).
DPK_KERNEL link_ids(const int64_t* ids, int64_t samples, int64_t length, int64_t* next) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * link_threads + threadIdx.x;
  if (t >= length) return;
  for (int64_t sample = blockIdx.y; sample < samples; sample += gridDim.y) {
    const int64_t* own = ids + sample * length;
    const int64_t id = own[t];
    int64_t later = t + 1, earlier = t - 1;
    while (later < length && own[later] != id) ++later;
    while (earlier >= 0 && own[earlier] != id) --earlier;
    next[sample * length + t] = 2 * later + (earlier >= 0 ? 1 : 0);
  }
}

// Grid: (T / 64, samples up to 65,535 at a time).
DPK_KERNEL lookup_partial(const int64_t* next, const float* g, int64_t samples, int64_t length, int64_t width,
                          double* partial) {
  DPK_SHARED double sums[warp_size];
  const int64_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int64_t low = static_cast<int64_t>(blockIdx.x) * lookup_lines;
  const int64_t high = low + lookup_lines < length ? low + lookup_lines : length;
  for (int64_t sample = blockIdx.y; sample < samples; sample += gridDim.y) {
    const int64_t* own = next + sample * length;
    const float* lines = g + sample * length * width;
    double total = 0.0;
    for (int64_t t = low + warp; t < high; t += lookup_threads / warp_size) {
      if (own[t] % 2 != 0) continue;
      for (int64_t j = lane; j < width; j += warp_size) {
        double sum = 0.0;
        for (int64_t s = t; s < length; s = own[s] / 2) sum += static_cast<double>(lines[s * width + j]);
        total += sum * sum;
      }
    }
    total = block_sum(total, sums);
    if (threadIdx.x == 0) partial[sample * gridDim.x + blockIdx.x] = total;
    __syncthreads();
  }
}

inline int64_t lookup_blocks(int64_t length) { return (length + lookup_lines - 1) / lookup_lines; }

// `next` has room for [samples, length], `partial` for [samples, lookup_blocks(length)].
inline void launch_lookup(const int64_t* ids, const float* g, int64_t samples, int64_t length, int64_t width,
                          int64_t* next, double* partial, cudaStream_t queue) {
  if (samples == 0 || length == 0) return;
  const auto rows = static_cast<unsigned>(samples < 65535 ? samples : 65535);
  const dim3 link_grid(static_cast<unsigned>((length + link_threads - 1) / link_threads), rows);
  DPK_LAUNCH(link_ids, link_grid, link_threads, 0, queue, ids, samples, length, next);
  const dim3 grid(static_cast<unsigned>(lookup_blocks(length)), rows);
  DPK_LAUNCH(lookup_partial, grid, lookup_threads, 0, queue, next, g, samples, length, width, partial);
}

}  // namespace dpk::cuda
