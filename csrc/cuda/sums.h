// Clipped, noised sums over samples on a GPU, over lists of hundreds of tensors: three launches, whatever their number.
//
//   products:      partial[b][c] = inner products of chunk c of row b                                   float64
//   coefficients:  added over the chunks of a group, then clipped by csrc/common/clip_rules.h           float64
//   noisy_sums:    out = (what it holds, if `filled`, + sum_b value(row_b; coefficients_b) + noise) * scale
//
// value = c (now - before), clamped to [-limit, limit] if asked; or, of momentum rows, c0 (now - c1 before) + c2
// before. Rows of float32, float64, bfloat16 or float16; `before` may be missing, or one row for all samples; sums in
// float32 or float64, rounded once. Deterministic: a chunk of 4,096 elements is one block's, added by a tree; an
// element of a sum is four threads', sample after sample, then added in order. A sample of coefficient 0 is left out by
// selection. 64-bit indices throughout.
//
// Tiling of noisy_sums: 64 threads by 4 slices of samples; a thread has the elements that one block of the generator
// serves (noise.h), 16 apart, so that 32 threads read runs of 64 bytes. Limiter: reading the rows, once for each pass;
// the second one is from the L2 cache where it holds them all.
#pragma once
#include <vector>

#include "../common/clip_rules.h"
#include "elements.h"
#include "noise.h"

namespace dpk::cuda {

// Rows of a tensor; strides are in elements.
struct Source {
  const void *now, *before;
  int64_t now_stride, before_stride, length;
  Element kind;
};

struct Chunk {
  int source;
  int64_t start, length;
};

// Where a sum goes: elements from `first` on of the whole release. It adds up sources begin .. end.
struct Target {
  void* data;
  int64_t first, length;
  int begin, end;
  bool wide, filled;
};

constexpr int64_t chunk_length = 4096;
constexpr int product_threads = 256, sum_lanes = 64, sum_slices = 4;

enum class Form : int { single = 0, momentum = 1 };
enum class Rule : int { squares = 0, flat = 1, automatic = 2, momentum = 3, clamp = 4 };

template <Form form>
constexpr int product_count = form == Form::momentum ? 5 : 1;
template <Form form>
constexpr int coefficient_count = form == Form::momentum ? 3 : 1;

DPK_DEVICE double before_of(const Source& rows, int64_t sample, int64_t i) {
  return rows.before == nullptr ? 0.0 : element(rows.before, rows.kind, sample * rows.before_stride + i);
}

// Grid: (chunks, samples up to 65,535 at a time).
template <Form form>
DPK_KERNEL products(const Source* sources, const Chunk* chunks, int64_t samples, double* partial) {
  constexpr int count = product_count<form>;
  DPK_SHARED double sums[count][warp_size];
  const Chunk chunk = chunks[blockIdx.x];
  const Source rows = sources[chunk.source];
  for (int64_t sample = blockIdx.y; sample < samples; sample += gridDim.y) {
    double sum[count] = {};
    DPK_UNROLL_4
    for (int64_t i = threadIdx.x; i < chunk.length; i += product_threads) {
      const double a = element(rows.now, rows.kind, sample * rows.now_stride + chunk.start + i);
      const double b = before_of(rows, sample, chunk.start + i), e = a - b;
      if constexpr (form == Form::single) {
        sum[0] += e * e;
      } else {
        sum[0] += a * a;
        sum[1] += b * b;
        sum[2] += e * e;
        sum[3] += e * b;
        sum[4] += a * b;
      }
    }
    for (int m = 0; m < count; ++m) {
      const double total = block_sum(sum[m], sums[m]);
      if (threadIdx.x == 0) partial[(sample * gridDim.x + blockIdx.x) * count + m] = total;
    }
    __syncthreads();
  }
}

struct RuleNumbers {
  Rule rule;
  double stability;
  MomentumBounds momentum;
};

// One warp for each sample. `ends`: one behind the last chunk of each group; `max_norms`: one for each group, if the
// rule has such; `norms` may be missing. A sample whose products are not all finite has coefficients 0.
template <Form form>
DPK_KERNEL coefficients(const double* partial, const int64_t* ends, int groups, int64_t samples, RuleNumbers numbers,
                        const double* max_norms, double* out, double* norms) {
  constexpr int count = product_count<form>, width = coefficient_count<form>;
  const int64_t sample = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_size;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  if (sample >= samples) return;
  const int64_t chunks = ends[groups - 1];
  double norm2 = 0.0;
  bool finite = true;
  double* mine = out + sample * groups * width;
  for (int group = 0; group < groups; ++group) {
    const int64_t begin = group == 0 ? 0 : ends[group - 1], end = ends[group];
    double product[count];
    for (int m = 0; m < count; ++m) {
      double sum = 0.0;
      for (int64_t c = begin + lane; c < end; c += warp_size) sum += partial[(sample * chunks + c) * count + m];
      product[m] = warp_sum(sum);
    }
    if (lane != 0) continue;
    const Chain chain{chunk_length, end - begin};
    for (int m = 0; m < count; ++m) finite = finite && product[m] - product[m] == 0.0;
    norm2 += product[0];
    if constexpr (form == Form::momentum) {
      momentum_coefficients(numbers.momentum, chain, product, mine);
    } else if (numbers.rule == Rule::squares) {
      mine[group] = product[0];
    } else if (numbers.rule == Rule::clamp) {
      mine[group] = 1.0;
    } else {
      mine[group] =
          clip_coefficient(product[0], chain, max_norms[group], numbers.rule == Rule::automatic, numbers.stability);
    }
  }
  if (lane != 0) return;
  if (norms != nullptr) norms[sample] = ::sqrt(norm2);
  if (finite || numbers.rule == Rule::squares) return;
  for (int i = 0; i < groups * width; ++i) mine[i] = 0.0;
}

// The coefficients of each sample: [samples][groups][width]; groups is 1, or the number of targets.
struct Weights {
  const double* of;
  int64_t samples;
  int groups;
  double limit;  // negative: nothing is clamped
};

template <Form form>
DPK_DEVICE double value_of(const Source& rows, int64_t sample, int64_t i, const double* c, double limit) {
  const double now = element(rows.now, rows.kind, sample * rows.now_stride + i), before = before_of(rows, sample, i);
  if constexpr (form == Form::momentum) return c[0] * (now - c[1] * before) + c[2] * before;
  double x = now - before;
  if (limit >= 0) x = x > limit ? limit : x < -limit ? -limit : x;
  return c[0] * x;
}

template <Form form>
DPK_DEVICE bool is_zero(const double* c) {
  if constexpr (form == Form::momentum) return c[0] == 0.0 && c[1] == 0.0 && c[2] == 0.0;
  return c[0] == 0.0;
}

template <Form form, class Noise, int slices>
DPK_KERNEL_OF(sum_lanes* slices, 12 / slices)
noisy_sums(const Target* targets, int count, int64_t total, const Source* sources, Weights weights, Noise noise,
           double scale) {
  constexpr int width = coefficient_count<form>, elements = Noise::elements;
  DPK_SHARED double partial[slices][elements][sum_lanes];
  const int lane = static_cast<int>(threadIdx.x) % sum_lanes, slice = static_cast<int>(threadIdx.x) / sum_lanes;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * sum_lanes + lane;
  const int64_t first = block / Noise::apart * group_elements + block % Noise::apart;
  DPK_UNROLL_1  // samples are unrolled, further in
      for (int w = 0; w < elements; ++w) {
    const int64_t at = first + w * Noise::apart;
    double sum = 0.0;
    if (at < total) {
      const int which = entry_of(targets, count, at);
      const Target& target = targets[which];
      const int64_t stride = static_cast<int64_t>(weights.groups) * width;
      const double* c = weights.of + (weights.groups > 1 ? which * width : 0);
      for (int s = target.begin; s < target.end; ++s) {
        const Source rows = sources[s];
        for (int64_t b = slice; b < weights.samples; b += slices) {
          if (is_zero<form>(c + b * stride)) continue;
          sum += value_of<form>(rows, b, at - target.first, c + b * stride, weights.limit);
        }
      }
    }
    partial[slice][w][lane] = sum;
  }
  __syncthreads();
  if (slice > 0 || first >= total) return;
  double z[elements];
  noise.draw(static_cast<uint64_t>(block), z);
  for (int w = 0; w < elements; ++w) {
    const int64_t at = first + w * Noise::apart;
    if (at >= total) return;
    const Target& target = targets[entry_of(targets, count, at)];
    const int64_t i = at - target.first;
    double sum = !target.filled ? 0.0
                 : target.wide  ? static_cast<const double*>(target.data)[i]
                                : static_cast<double>(static_cast<const float*>(target.data)[i]);
    for (int s = 0; s < slices; ++s) sum += partial[s][w][lane];
    sum = noise.add(sum, z[w]) * scale;
    if (target.wide) {
      static_cast<double*>(target.data)[i] = sum;
    } else {
      static_cast<float*>(target.data)[i] = static_cast<float>(sum);
    }
  }
}

// The tables of a call, made on the host; kernels take copies of them in the device's memory.
struct Tables {
  std::vector<Source> sources;
  std::vector<Chunk> chunks;
  std::vector<Target> targets;
  int64_t total = 0;  // elements of all targets

  void add_target(void* data, int64_t length, bool wide, bool filled) {
    const int begin = static_cast<int>(sources.size());
    targets.push_back({data, total, length, begin, begin, wide, filled});
    total += length;
  }
  // Of the target added last, if there is one.
  void add_source(const Source& source) {
    for (int64_t start = 0; start < source.length; start += chunk_length) {
      const int64_t rest = source.length - start;
      chunks.push_back({static_cast<int>(sources.size()), start, rest < chunk_length ? rest : chunk_length});
    }
    sources.push_back(source);
    if (!targets.empty()) targets.back().end = static_cast<int>(sources.size());
  }
  // One behind the last chunk of each group: all sources together, or each its own.
  std::vector<int64_t> ends(int groups) const {
    std::vector<int64_t> found(static_cast<size_t>(groups), static_cast<int64_t>(chunks.size()));
    if (groups == 1) return found;
    for (auto& end : found) end = 0;
    for (const Chunk& chunk : chunks) ++found[static_cast<size_t>(chunk.source)];
    for (size_t i = 1; i < found.size(); ++i) found[i] += found[i - 1];
    return found;
  }
};

template <Form form>
void launch_products(const Source* sources, const Chunk* chunks, int64_t chunk_count, int64_t samples, double* partial,
                     cudaStream_t queue) {
  if (chunk_count == 0 || samples == 0) return;
  const dim3 grid(static_cast<unsigned>(chunk_count), static_cast<unsigned>(samples < 65535 ? samples : 65535));
  DPK_LAUNCH(products<form>, grid, product_threads, 0, queue, sources, chunks, samples, partial);
}

template <Form form>
void launch_coefficients(const double* partial, const int64_t* ends, int groups, int64_t samples,
                         const RuleNumbers& numbers, const double* max_norms, double* out, double* norms,
                         cudaStream_t queue) {
  constexpr unsigned threads = 128;
  const auto blocks = static_cast<unsigned>((samples * warp_size + threads - 1) / threads);
  if (blocks == 0 || groups == 0) return;
  DPK_LAUNCH(coefficients<form>, blocks, threads, 0, queue, partial, ends, groups, samples, numbers, max_norms, out,
             norms);
}

template <Form form, class Noise>
void launch_sums(const Target* targets, int count, int64_t total, const Source* sources, const Weights& weights,
                 const Noise& noise, double scale, cudaStream_t queue) {
  constexpr int64_t each = sum_lanes * Noise::elements;
  const auto blocks = static_cast<unsigned>((total + each - 1) / each);
  if (blocks == 0) return;
  if (weights.samples == 0) {
    DPK_LAUNCH((noisy_sums<form, Noise, 1>), blocks, sum_lanes, 0, queue, targets, count, total, sources, weights,
               noise, scale);
  } else {
    DPK_LAUNCH((noisy_sums<form, Noise, sum_slices>), blocks, sum_lanes * sum_slices, 0, queue, targets, count, total,
               sources, weights, noise, scale);
  }
}

}  // namespace dpk::cuda
