// sparsify: keep each coordinate with probability p, send (x + noise) / p for the kept ones.
//
//   kept    = { j : word_j(seed) < p 2^32 }          mask purpose, key = the public seed
//   indices = kept, ascending;   values[k] = (x[indices[k]] + std * z_k) / p
//
// Noise is made for the kept coordinates only and counted by place in the message. First the mask as bits and
// its counts, then one pass over the kept coordinates. x is read once, where kept. Same result for any number of
// threads: chunks are fixed. Limit: the generator, a quarter of a Philox block a coordinate.
#include <algorithm>
#include <numeric>

#include "arguments.h"
#include "parallel.h"

namespace dpk {
namespace {

constexpr int64_t chunk_groups = 256, chunk_elements = chunk_groups * group_elements;

struct Mask {
  std::vector<uint64_t> bits;   // one word a group
  std::vector<int64_t> offset;  // kept coordinates before each chunk, and in all
};

Mask draw_mask(int64_t size, double keep_probability, Stream stream) {
  const int64_t groups = (size + group_elements - 1) / group_elements;
  const int64_t chunks = (groups + chunk_groups - 1) / chunk_groups;
  Mask mask{std::vector<uint64_t>(static_cast<size_t>(groups)), std::vector<int64_t>(static_cast<size_t>(chunks + 1))};
  const double threshold = keep_probability * 0x1p32;
  const bool keep_all = threshold >= 0x1p32;
  parallel_for(0, chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * chunk_groups, count = std::min(chunk_groups, groups - first);
      uint64_t* bits = &mask.bits[static_cast<size_t>(first)];
      if (keep_all) {
        std::fill_n(bits, count, ~uint64_t{0});
      } else {
        random_kernels().mask(bits, count, static_cast<uint64_t>(first), stream, static_cast<uint32_t>(threshold));
      }
      if (first + count == groups && size % group_elements)
        bits[count - 1] &= (uint64_t{1} << size % group_elements) - 1;
      int64_t kept = 0;
      for (int64_t g = 0; g < count; ++g) kept += __builtin_popcountll(bits[g]);
      mask.offset[static_cast<size_t>(chunk + 1)] = kept;
    }
  });
  std::partial_sum(mask.offset.begin(), mask.offset.end(), mask.offset.begin());
  return mask;
}

template <class T>
void gather(const Mask& mask, const T* x, int64_t* indices, T* values, const Noise& noise, double scale) {
  const int64_t groups = static_cast<int64_t>(mask.bits.size());
  parallel_for(0, static_cast<int64_t>(mask.offset.size()) - 1, 4, [&](int64_t begin, int64_t end) {
    NoiseAdder adder(noise);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      int64_t at = mask.offset[static_cast<size_t>(chunk)];
      const int64_t first = at, last = mask.offset[static_cast<size_t>(chunk + 1)];
      for (int64_t g = chunk * chunk_groups; g < std::min(groups, (chunk + 1) * chunk_groups); ++g) {
        for (uint64_t bits = mask.bits[static_cast<size_t>(g)]; bits; bits &= bits - 1) {
          const int64_t j = g * group_elements + __builtin_ctzll(bits);
          indices[at] = j;
          values[at++] = x[j];
        }
      }
      adder.add(values + first, values + first, last - first, first, scale);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> sparsify(const Tensor& vector, double keep_probability, const Tensor& seed,
                                    const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  const Tensor x = torch::stable::to(torch::stable::contiguous(vector), wide_type(vector));
  const Noise noise = noise_of(stream, std);
  const Mask mask = draw_mask(x.numel(), keep_probability, {static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()), 0});
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

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("sparsify", TORCH_BOX(&dpk::sparsify)); }
