// sparsify on a GPU: the mask of csrc/cpu/sparsify.cpp bit for bit, compacted in order.
//
//   kept = { j : word_j(seed) < p 2^32 };   indices = kept, ascending;   values[k] = x[indices[k]]
//
// and then noise.h adds noise to the values, counted by place in the message, and scales them. A warp draws 32 Philox
// blocks, the words of 2 groups of 64 elements; four votes make their masks, from which every lane knows the rank of
// its elements. A block of 256 threads takes 1,024 elements. First all blocks count, then one block adds the counts up
// in order, then all draw again and write: no atomics, the same result each time. Limiter: the generator, twice a
// quarter of a Philox block an element.
#pragma once
#include "../common/philox.h"
#include "device.h"

namespace dpk::cuda {

constexpr int mask_threads = 256, mask_warps = mask_threads / warp_size;
constexpr int64_t mask_elements = mask_threads * 4;  // of a block

// The masks of the two groups that a warp has.
DPK_DEVICE void warp_masks(Stream stream, uint32_t threshold, bool keep_all, int64_t block, int64_t size,
                           uint64_t (&masks)[2]) {
  const PhiloxWords words = philox(stream, Purpose::mask, static_cast<uint64_t>(block));
  const int64_t first = block / group_blocks * group_elements + block % group_blocks;
  masks[0] = masks[1] = 0;
  for (int w = 0; w < 4; ++w) {
    const bool kept = first + w * group_blocks < size && (keep_all || words.word[w] < threshold);
    const unsigned votes = __ballot_sync(all_lanes, kept);
    masks[0] |= static_cast<uint64_t>(votes & 0xFFFFu) << (16 * w);
    masks[1] |= static_cast<uint64_t>(votes >> 16) << (16 * w);
  }
}

DPK_KERNEL count_kept(Stream stream, uint32_t threshold, bool keep_all, int64_t size, int64_t* counts) {
  DPK_SHARED int partial[warp_size];
  const int64_t block = static_cast<int64_t>(blockIdx.x) * mask_threads + threadIdx.x;
  uint64_t masks[2];
  warp_masks(stream, threshold, keep_all, block, size, masks);
  const int mine = threadIdx.x % warp_size == 0 ? __popcll(masks[0]) + __popcll(masks[1]) : 0;
  const int total = block_sum(mine, partial);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// counts[i] becomes the sum of those before it; the sum of all goes to counts[blocks]. One block of 1,024 threads.
DPK_KERNEL add_up_counts(int64_t* counts, int64_t blocks) {
  DPK_SHARED int64_t sums[1024];
  const int64_t each = (blocks + 1023) / 1024, first = threadIdx.x * each;
  const int64_t last = first + each < blocks ? first + each : blocks;
  int64_t mine = 0;
  for (int64_t i = first; i < last; ++i) mine += counts[i];
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned step = 1; step < 1024; step *= 2) {
    const int64_t before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  int64_t sum = sums[threadIdx.x] - mine;
  for (int64_t i = first; i < last; ++i) {
    const int64_t count = counts[i];
    counts[i] = sum;
    sum += count;
  }
  if (threadIdx.x == 1023) counts[blocks] = sums[1023];
}

template <class T>
DPK_KERNEL gather_kept(const T* x, Stream stream, uint32_t threshold, bool keep_all, int64_t size,
                       const int64_t* offsets, int64_t* indices, T* values) {
  DPK_SHARED int counts[mask_warps];
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * mask_threads + threadIdx.x;
  uint64_t masks[2];
  warp_masks(stream, threshold, keep_all, block, size, masks);
  if (lane == 0) counts[warp] = __popcll(masks[0]) + __popcll(masks[1]);
  __syncthreads();
  const int group = lane / static_cast<int>(group_blocks), place = lane % static_cast<int>(group_blocks);
  int64_t at = offsets[blockIdx.x] + (group == 1 ? __popcll(masks[0]) : 0);
  for (int w = 0; w < warp; ++w) at += counts[w];
  const int64_t first = block / group_blocks * group_elements;
  for (int w = 0; w < 4; ++w) {
    const int bit = place + 16 * w;
    if (!(masks[group] >> bit & 1u)) continue;
    const int64_t to = at + __popcll(masks[group] & ((uint64_t{1} << bit) - 1));
    indices[to] = first + bit;
    values[to] = x[first + bit];
  }
}

inline int64_t mask_blocks(int64_t size) { return (size + mask_elements - 1) / mask_elements; }

struct MaskRule {
  Stream stream;
  uint32_t threshold;
  bool keep_all;
};

inline MaskRule mask_rule(int64_t seed, double keep_probability) {
  const double threshold = keep_probability * 0x1p32;
  const bool keep_all = threshold >= 0x1p32;
  return {{static_cast<uint64_t>(seed), 0}, keep_all ? 0u : static_cast<uint32_t>(threshold), keep_all};
}

// `counts` has room for mask_blocks(size) + 1; afterwards its last one is the number of kept elements.
inline void launch_count(const MaskRule& rule, int64_t size, int64_t* counts, cudaStream_t queue) {
  const auto blocks = mask_blocks(size);
  if (blocks > 0) {
    DPK_LAUNCH(count_kept, static_cast<unsigned>(blocks), mask_threads, 0, queue, rule.stream, rule.threshold,
               rule.keep_all, size, counts);
  }
  DPK_LAUNCH(add_up_counts, 1, 1024, 0, queue, counts, blocks);
}

template <class T>
void launch_gather(const T* x, const MaskRule& rule, int64_t size, const int64_t* offsets, int64_t* indices, T* values,
                   cudaStream_t queue) {
  const auto blocks = static_cast<unsigned>(mask_blocks(size));
  if (blocks > 0) {
    DPK_LAUNCH(gather_kept<T>, blocks, mask_threads, 0, queue, x, rule.stream, rule.threshold, rule.keep_all, size,
               offsets, indices, values);
  }
}

}  // namespace dpk::cuda
