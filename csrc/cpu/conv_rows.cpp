// conv_rows: each image's weight gradient of a convolution and its norm^2 (weight_rows.h). With an underscore: added
// onto weights of its own, or clamped and added to the sum of a run of images.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "convolution.h"
#include "formed_rows.h"
#include "parallel.h"
#include "pooled_floats.h"
#include "scratch.h"
#include "weight_rows.h"

namespace dpk {
namespace {

constexpr int64_t longest_sum = 1024;  // places added up in one register

// One sample's group with channels last, within zeros.
void pack_inputs(const Convolution& s, const Three& padded, const WeightRowKernels& k, const float* x, float* packed) {
  const int64_t plane = s.in[1] * s.in[2], line = padded[2] * s.inputs;
  if (padded == s.in) {
    return k.interleave(x, s.in[0] * plane, static_cast<int>(s.inputs), s.in[0] * plane, packed, s.inputs);
  }
  std::fill_n(packed, padded[0] * padded[1] * line, 0.0f);
  for (int64_t z = 0; z < s.in[0]; ++z) {
    for (int64_t y = 0; y < s.in[1]; ++y) {
      float* to = packed + ((z + s.padding[0]) * padded[1] + y + s.padding[1]) * line + s.padding[2] * s.inputs;
      k.interleave(x + z * plane + y * s.in[2], s.in[0] * plane, static_cast<int>(s.inputs), s.in[2], to, s.inputs);
    }
  }
}

// The rows of up to `block` outputs, [lines][taps][inputs] in `tile`.
void conv_tile(const Convolution& s, const Three& padded, const WeightRowKernels& k, const float* g, int lines,
               const float* x, float* tile, int64_t tile_stride) {
  const int64_t line = padded[2] * s.inputs, plane = padded[1] * line;
  const int64_t runs = s.dilation[2] == 1 ? 1 : s.kernel[2], run = s.kernel[2] * s.inputs / runs;
  const int64_t rows_at_a_time = std::max<int64_t>(1, longest_sum / std::max<int64_t>(s.out[2], 1));
  for (int64_t kz = 0; kz < s.kernel[0]; ++kz) {
    for (int64_t ky = 0; ky < s.kernel[1]; ++ky) {
      for (int64_t r = 0; r < runs; ++r) {
        const float* from = x + kz * s.dilation[0] * plane + ky * s.dilation[1] * line + r * s.dilation[2] * s.inputs;
        float* to = tile + ((kz * s.kernel[1] + ky) * s.kernel[2] + r) * s.inputs;
        for (int64_t first = 0; first < run; first += tile_vectors * k.lanes) {
          const int64_t width = std::min<int64_t>(tile_vectors * k.lanes, run - first);
          bool onto = false;
          for (int64_t z = 0; z < s.out[0]; ++z) {
            for (int64_t y = 0; y < s.out[1]; y += rows_at_a_time) {
              const Walk walk{{1, std::min(rows_at_a_time, s.out[1] - y), s.out[2]},
                              {0, s.stride[1] * line, s.stride[2] * s.inputs}};
              k.product(g + (z * s.out[1] + y) * s.out[2] * k.block, lines,
                        from + z * s.stride[0] * plane + y * s.stride[1] * line + first, width, walk, to + first,
                        tile_stride, onto);
              onto = true;
            }
          }
        }
      }
    }
  }
}

// The images and output gradients of a convolution, whose outputs are cut into blocks.
struct ConvFactors {
  Tensor x, g;
  Convolution s;
  Three padded;
  const WeightRowKernels& k;
  int64_t taps, places, row, slack, blocks;

  ConvFactors(const Tensor& x_given, const Tensor& g_given, const Three& kernel, const std::vector<int64_t>& stride,
              const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups)
      : x(torch::stable::contiguous(x_given)),
        g(torch::stable::contiguous(g_given)),
        s{x.size(0),       groups, x.size(1) / groups, g.size(1) / groups, places_of(x, 2),
          places_of(g, 2), kernel, three(stride, 1),   three(padding, 0),  three(dilation, 1)},
        padded(s.reach()),
        k(weight_row_kernels()),
        taps(product_of(kernel)),
        places(product_of(s.out)),
        row(taps * s.inputs),
        slack(tile_vectors * k.lanes),
        blocks(divide_up(s.outputs, k.block)) {
    for (size_t d = 0; d < 3; ++d) padded[d] = std::max(s.in[d] + s.padding[d], padded[d]);
  }

  // The inputs of a group, of all groups of all samples.
  const float* packed(int64_t group) const {
    float* to = scratch(0, product_of(padded) * s.inputs + slack);
    pack_inputs(s, padded, k, x.const_data_ptr<float>() + group * s.inputs * product_of(s.in), to);
    return to;
  }

  // Forms the lines of one block of outputs in a group's row: visit(line, which).
  template <class Visit>
  void form(const float* x_packed, int64_t group, int64_t block, const Visit& visit) const {
    float* g_packed = scratch(1, places * k.block);
    float* tile = scratch(2, k.block * (row + slack));
    float* turned = scratch(3, row);
    const int64_t first = block * k.block;
    const int lines = static_cast<int>(std::min<int64_t>(k.block, s.outputs - first));
    k.interleave(g.const_data_ptr<float>() + (group * s.outputs + first) * places, places, lines, places, g_packed,
                 k.block);
    if (places == 0) std::fill_n(tile, lines * (row + slack), 0.0f);
    conv_tile(s, padded, k, g_packed, lines, x_packed, tile, row + slack);
    for (int m = 0; m < lines; ++m) {
      const float* from = tile + m * (row + slack);
      if (taps > 1 && s.inputs > 1) {
        k.interleave(from, s.inputs, static_cast<int>(taps), s.inputs, turned, taps);
        from = turned;
      }
      visit(from, first + m);
    }
  }
};

Tensor form_conv(const ConvFactors& f, const Destination& out) {
  const int64_t samples_groups = f.s.batch * f.s.groups, parts = parts_of(samples_groups, f.blocks);
  const bool past_caches = many(samples_groups * f.s.outputs * f.row);
  std::vector<double> squares(static_cast<size_t>(samples_groups * f.blocks), 0.0);
  parallel_for(0, samples_groups * parts, 1, [&](int64_t begin, int64_t end) {
    int64_t packed_for = -1;
    const float* packed = nullptr;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t group = unit / parts, part = unit % parts;  // of all groups of all samples
      if (group != packed_for) packed = f.packed(group);
      packed_for = group;
      for (int64_t b = f.blocks * part / parts; b < f.blocks * (part + 1) / parts; ++b) {
        double& square = squares[static_cast<size_t>(group * f.blocks + b)];
        f.form(packed, group, b, [&](const float* line, int64_t which) {
          square += out.put(f.k, line, f.row, 1, f.row, (group * f.s.outputs + which) * f.row, f.row, past_caches);
        });
      }
    }
    fence();
  });
  return sum_of_parts(squares, f.s.batch);
}

}  // namespace

std::tuple<Tensor, Tensor> conv_rows(const Tensor& x, const Tensor& g, std::vector<int64_t> kernel,
                                     std::vector<int64_t> stride, std::vector<int64_t> padding,
                                     std::vector<int64_t> dilation, int64_t groups) {
  std::vector<int64_t> sizes{x.size(0), g.size(1), x.size(1) / groups};
  sizes.insert(sizes.end(), kernel.begin(), kernel.end());
  Tensor rows = pooled_floats(sizes);
  const ConvFactors factors(x, g, three(kernel, 1), stride, padding, dilation, groups);
  Tensor squares = form_conv(factors, {rows.mutable_data_ptr<float>()});
  return {rows, squares};
}

void conv_rows_(Tensor rows, const Tensor& x, const Tensor& g, double scale, std::vector<int64_t> stride,
                std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  STD_TORCH_CHECK(rows.dim() == x.dim() + 1 && rows.size(0) == x.size(0) && rows.size(1) == g.size(1) &&
                      rows.size(2) == x.size(1) / groups && g.size(0) == x.size(0),
                  "conv_rows_: sizes do not fit together");
  form_conv({x, g, places_of(rows, 3), stride, padding, dilation, groups},
            {rows.mutable_data_ptr<float>(), true, static_cast<float>(scale)});
}

// sums [N, O, C / groups, *kernel]: those of N equal runs of images, one after the other
void conv_clamp_sum_(Tensor sums, const Tensor& x, const Tensor& g, double bound, std::vector<int64_t> stride,
                     std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  const int64_t runs = sums.size(0), each = runs ? x.size(0) / runs : 0;
  STD_TORCH_CHECK(sums.dim() == x.dim() + 1 && sums.size(1) == g.size(1) && sums.size(2) == x.size(1) / groups &&
                      g.size(0) == x.size(0) && runs * each == x.size(0) && are_sums(sums),
                  "conv_clamp_sum_: sizes do not fit together");
  const ConvFactors f(x, g, places_of(sums, 3), stride, padding, dilation, groups);
  auto* out = sums.mutable_data_ptr<double>();
  const float limit = limit_of(bound);
  const int64_t pieces = groups * f.blocks;  // of a sum; each is one thread's
  parallel_for(0, runs * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n = unit / pieces, group = unit % pieces / f.blocks, block = unit % f.blocks;
      double* sum = out + n * sums.stride(0) + group * f.s.outputs * f.row;
      for (int64_t b = n * each; b < (n + 1) * each; ++b) {
        f.form(f.packed(b * groups + group), b * groups + group, block, [&](const float* line, int64_t which) {
          f.k.clamp_add(line, f.row, 1, f.row, limit, sum + which * f.row, f.row);
        });
      }
    }
  });
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("conv_rows", TORCH_BOX(&dpk::conv_rows));
  m.impl("conv_rows_", TORCH_BOX(&dpk::conv_rows_));
  m.impl("conv_clamp_sum_", TORCH_BOX(&dpk::conv_clamp_sum_));
}
