// sparsify: keep each coordinate with probability p, send (x + noise) / p for the kept ones.
//
//   kept    = { j : word_j(seed) < p 2^32 }          mask purpose, key = the public seed
//   indices = kept, ascending;   values[k] = (x[indices[k]] + std * z_k) / p
//
// Noise is made for the kept coordinates only and counted by place in the message. First the mask as bits and
// its counts, then one pass over the kept coordinates. x is read once, where kept. Same result for any number of
// threads: chunks are fixed. Limit: the generator, a quarter of a Philox block a coordinate.
//
// masks: the kept coordinates of several vectors of one size, one vector behind another, each with a seed of its own.
#include <algorithm>
#include <numeric>

#include "arguments.h"
#include "parallel.h"

namespace dpk {
namespace {

constexpr int64_t chunk_groups = 256;

// The masks of some vectors, in chunks that never have coordinates of two of them.
struct Masks {
  int64_t size, groups, chunks;  // of one vector
  std::vector<uint64_t> bits;    // [vectors][groups]: 64 coordinates in a word
  std::vector<int64_t> offset;   // kept coordinates before each chunk of each vector, and in all

  int64_t first_group(int64_t chunk) const { return chunk % chunks * chunk_groups; }
  int64_t group_count(int64_t chunk) const { return std::min(chunk_groups, groups - first_group(chunk)); }

  // visit(place among all that are kept, coordinate) for what a chunk keeps
  template <class Visit>
  void each_kept(int64_t chunk, const Visit& visit) const {
    int64_t at = offset[static_cast<size_t>(chunk)];
    const int64_t first = first_group(chunk);
    const uint64_t* words = &bits[static_cast<size_t>(chunk / chunks * groups)];
    for (int64_t g = first; g < first + group_count(chunk); ++g) {
      for (uint64_t word = words[g]; word; word &= word - 1) visit(at++, g * group_elements + __builtin_ctzll(word));
    }
  }
};

Masks draw_masks(int64_t size, double keep_probability, const int64_t* seeds, int64_t vectors) {
  const int64_t groups = divide_up(size, group_elements), chunks = divide_up(groups, chunk_groups);
  Masks masks{size, groups, chunks, std::vector<uint64_t>(static_cast<size_t>(vectors * groups)),
              std::vector<int64_t>(static_cast<size_t>(vectors * chunks + 1))};
  const double threshold = keep_probability * 0x1p32;
  const bool keep_all = threshold >= 0x1p32;
  parallel_for(0, vectors * chunks, divide_up(4 * chunk_groups, std::min(groups, chunk_groups) + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t chunk = begin; chunk < end; ++chunk) {
                   const int64_t first = masks.first_group(chunk), count = masks.group_count(chunk);
                   uint64_t* bits = &masks.bits[static_cast<size_t>(chunk / chunks * groups + first)];
                   const Stream stream{static_cast<uint64_t>(seeds[chunk / chunks]), 0};
                   if (keep_all) {
                     std::fill_n(bits, count, ~uint64_t{0});
                   } else {
                     random_kernels().mask(bits, count, static_cast<uint64_t>(first), stream,
                                           static_cast<uint32_t>(threshold));
                   }
                   if (first + count == groups && size % group_elements)
                     bits[count - 1] &= (uint64_t{1} << size % group_elements) - 1;
                   int64_t kept = 0;
                   for (int64_t g = 0; g < count; ++g) kept += __builtin_popcountll(bits[g]);
                   masks.offset[static_cast<size_t>(chunk + 1)] = kept;
                 }
               });
  std::partial_sum(masks.offset.begin(), masks.offset.end(), masks.offset.begin());
  return masks;
}

template <class T>
void gather(const Masks& mask, const T* x, int64_t* indices, T* values, const Noise& noise, double scale) {
  parallel_for(0, mask.chunks, 4, [&](int64_t begin, int64_t end) {
    NoiseAdder adder(noise);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      mask.each_kept(chunk, [&](int64_t at, int64_t j) {
        indices[at] = j;
        values[at] = x[j];
      });
      const int64_t first = mask.offset[static_cast<size_t>(chunk)];
      const int64_t last = mask.offset[static_cast<size_t>(chunk + 1)];
      adder.add(values + first, values + first, last - first, first, scale);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> sparsify(const Tensor& vector, double keep_probability, const Tensor& seed,
                                    const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  const Tensor x = torch::stable::to(torch::stable::contiguous(vector), wide_type(vector));
  const Noise noise = noise_of(stream, std);
  const Masks mask = draw_masks(x.numel(), keep_probability, seed.const_data_ptr<int64_t>(), 1);
  const int64_t kept[] = {mask.offset.back()};
  Tensor indices = torch::stable::new_empty(x, kept, ScalarType::Long), values = torch::stable::new_empty(x, kept);
  const double scale = 1.0 / keep_probability;
  if (x.scalar_type() == ScalarType::Double) {
    gather(mask, x.const_data_ptr<double>(), indices.mutable_data_ptr<int64_t>(), values.mutable_data_ptr<double>(),
           noise, scale);
  } else {
    gather(mask, x.const_data_ptr<float>(), indices.mutable_data_ptr<int64_t>(), values.mutable_data_ptr<float>(),
           noise, scale);
  }
  return {values, indices};
}

// Coordinates are counted over all vectors, [N, size]; none where only their numbers are wanted.
std::tuple<Tensor, Tensor> masks(const Tensor& seeds_given, int64_t size, double keep_probability, bool with_indices) {
  const Tensor seeds = torch::stable::contiguous(seeds_given);
  const int64_t vectors = seeds.numel();
  const Masks found = draw_masks(size, keep_probability, seeds.const_data_ptr<int64_t>(), vectors);
  const int64_t kept[] = {with_indices ? found.offset.back() : 0}, each[] = {vectors};
  Tensor indices = torch::stable::new_empty(seeds, kept), counts = torch::stable::new_empty(seeds, each);
  auto* to = indices.mutable_data_ptr<int64_t>();
  auto* count = counts.mutable_data_ptr<int64_t>();
  for (int64_t n = 0; n < vectors; ++n) {
    const auto first = static_cast<size_t>(n * found.chunks), last = static_cast<size_t>((n + 1) * found.chunks);
    count[n] = found.offset[last] - found.offset[first];
  }
  if (!with_indices) return {indices, counts};
  parallel_for(0, vectors * found.chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t before = chunk / found.chunks * size;
      found.each_kept(chunk, [&](int64_t at, int64_t j) { to[at] = before + j; });
    }
  });
  return {indices, counts};
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("sparsify", TORCH_BOX(&dpk::sparsify));
  m.impl("masks", TORCH_BOX(&dpk::masks));
}
