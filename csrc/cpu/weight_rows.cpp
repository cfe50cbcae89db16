// outer_rows, outer_squares and conv_rows: each sample's weight gradient and its norm^2 (weight_rows.h). With an
// underscore: added onto weights of its own, or clamped and added to the sum of a run of samples.
#include "weight_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "convolution.h"
#include "parallel.h"
#include "pooled_floats.h"
#include "scratch.h"

#define DPK_KERNEL_FILE "weight_rows_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const WeightRowKernels& weight_row_kernels() {
  static constexpr WeightRowKernels tables[] = DPK_TABLES(weight_rows);
  return tables[static_cast<int>(active_isa())];
}

namespace {

constexpr int64_t places_at_a_time = 256;             // a packed run of this many places fits the first-level cache
constexpr int64_t lines_at_a_time = 8;                // copied into blocks
constexpr int64_t longest_sum = 1024;                 // places added up in one register
constexpr int64_t streamed_bytes = int64_t{4} << 20;  // larger results are not read again from cache

void fence() {
#if DPK_HAVE_X86_VARIANTS
  _mm_sfence();
#endif
}

bool many(int64_t floats) { return floats * static_cast<int64_t>(sizeof(float)) >= streamed_bytes; }

// The largest float that is not beyond the bound.
float limit_of(double bound) {
  const auto limit = static_cast<float>(bound);
  return static_cast<double>(limit) > bound ? std::nextafter(limit, 0.0f) : limit;
}

Tensor sum_of_parts(const std::vector<double>& parts, int64_t batch) {
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

// The factors of a linear layer's rows, whose columns are cut into panels of about equal width.
struct OuterFactors {
  Tensor a, g;
  int64_t batch, length, width, height, tile, panels, blocks;
  const WeightRowKernels& k;

  OuterFactors(const Tensor& a_given, const Tensor& g_given)
      : a(with_contiguous_lines(a_given)),
        g(with_contiguous_lines(g_given)),
        batch(a.size(0)),
        length(a.size(1)),
        width(a.size(2)),
        height(g.size(2)),
        tile(tile_vectors * weight_row_kernels().lanes),
        panels(divide_up(width, tile)),
        blocks(divide_up(height, weight_row_kernels().block)),
        k(weight_row_kernels()) {}

  int64_t start(int64_t panel) const { return panel * divide_up(width, k.lanes) / panels * k.lanes; }

  // The g's of a sample, [blocks][length][block]: a few lines of all blocks at a time, to read and write in runs.
  const float* packed(int64_t b) const {
    float* to = scratch(0, blocks * length * k.block);
    for (int64_t t = 0; t < length; t += lines_at_a_time) {
      const int64_t count = std::min(lines_at_a_time, length - t);
      const float* from = g.const_data_ptr<float>() + b * g.stride(0) + t * g.stride(1);
      for (int64_t i = 0; i < height; i += k.block) {
        k.pack(from + i, g.stride(1), count, std::min<int64_t>(k.block, height - i), to + i * length + t * k.block,
               k.block, k.block);
      }
    }
    return to;
  }

  // Forms the columns of one panel of a sample's row: visit(tile, its first line, lines, first column, columns).
  template <class Visit>
  void form(const float* g_packed, int64_t b, int64_t p, const Visit& visit) const {
    float* panel = scratch(1, places_at_a_time * tile);
    float* tiles = scratch(2, blocks * k.block * tile);
    const int64_t first = start(p), columns = std::min(start(p + 1), width) - first;
    const int64_t run = divide_up(columns, k.lanes) * k.lanes;
    for (int64_t t0 = 0; t0 < length || t0 == 0; t0 += places_at_a_time) {
      const int64_t count = std::min(places_at_a_time, length - t0);
      k.pack(a.const_data_ptr<float>() + b * a.stride(0) + t0 * a.stride(1) + first, a.stride(1), count, columns, panel,
             run, run);
      const Walk walk{{1, 1, count}, {0, 0, run}};
      for (int64_t i = 0; i < height; i += k.block) {
        const int lines = static_cast<int>(std::min<int64_t>(k.block, height - i));
        float* at = tiles + i * tile;
        k.product(g_packed + i * length + t0 * k.block, lines, panel, columns, walk, at, tile, t0 > 0);
        if (t0 + count >= length) visit(at, i, lines, first, columns);
      }
    }
  }
};

// The squares, unless rows are added onto others.
Tensor form_outer(const Tensor& a, const Tensor& g, const Destination& out) {
  const OuterFactors f(a, g);
  const bool past_caches = many(f.batch * f.height * f.width);
  const int64_t parts = parts_of(f.batch, f.panels);
  std::vector<double> squares(static_cast<size_t>(f.batch * f.panels), 0.0);
  parallel_for(0, f.batch * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / parts, part = unit % parts;
      const float* packed = f.packed(b);
      for (int64_t p = f.panels * part / parts; p < f.panels * (part + 1) / parts; ++p) {
        double& square = squares[static_cast<size_t>(b * f.panels + p)];
        f.form(packed, b, p, [&](const float* tile, int64_t line, int lines, int64_t first, int64_t columns) {
          square +=
              out.put(f.k, tile, f.tile, lines, columns, (b * f.height + line) * f.width + first, f.width, past_caches);
        });
      }
    }
    fence();
  });
  return sum_of_parts(squares, f.batch);
}

}  // namespace

std::tuple<Tensor, Tensor> outer_rows(const Tensor& a, const Tensor& g) {
  Tensor rows = pooled_floats({a.size(0), g.size(2), a.size(2)});
  Tensor squares = form_outer(a, g, {rows.mutable_data_ptr<float>()});
  return {rows, squares};
}

void outer_rows_(Tensor rows, const Tensor& a, const Tensor& g, double scale) {
  STD_TORCH_CHECK(rows.size(0) == a.size(0) && rows.size(1) == g.size(2) && rows.size(2) == a.size(2) &&
                      g.size(0) == a.size(0) && g.size(1) == a.size(1),
                  "outer_rows_: sizes do not fit together");
  form_outer(a, g, {rows.mutable_data_ptr<float>(), true, static_cast<float>(scale)});
}

Tensor outer_squares(const Tensor& a, const Tensor& g) { return form_outer(a, g, {}); }

// Sums of runs in float64, [N, ...], each of them contiguous.
bool are_sums(const Tensor& sums) {
  int64_t stride = 1;
  for (int64_t d = sums.dim() - 1; d > 0; --d) {
    if (sums.size(d) != 1 && sums.stride(d) != stride) return false;
    stride *= sums.size(d);
  }
  return sums.scalar_type() == ScalarType::Double;
}

// sums [N, height, width]: those of N equal runs of samples, one after the other, of those that are live
void outer_clamp_sum_(Tensor sums, const Tensor& a, const Tensor& g, const std::optional<Tensor>& live, double bound) {
  const OuterFactors f(a, g);
  const int64_t runs = sums.size(0), each = runs ? f.batch / runs : 0;
  STD_TORCH_CHECK(sums.size(1) == f.height && sums.size(2) == f.width && f.g.size(0) == f.batch &&
                      f.g.size(1) == f.length && runs * each == f.batch && are_sums(sums) &&
                      (!live || (live->numel() == f.batch && live->is_contiguous())),
                  "outer_clamp_sum_: sizes do not fit together");
  const bool* counts = live ? live->const_data_ptr<bool>() : nullptr;
  auto* out = sums.mutable_data_ptr<double>();
  const float limit = limit_of(bound);
  if (f.length == 1) {  // sums stay in registers
    const int64_t parts = parts_of(runs, f.blocks);
    parallel_for(0, runs * parts, 1, [&](int64_t begin, int64_t end) {
      std::vector<int64_t> samples(static_cast<size_t>(each));
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t n = unit / parts, part = unit % parts;
        const int64_t first = f.blocks * part / parts * f.k.block,
                      last = std::min(f.blocks * (part + 1) / parts * f.k.block, f.height);
        int64_t count = 0;
        for (int64_t b = n * each; b < (n + 1) * each; ++b) {
          if (counts == nullptr || counts[b]) samples[static_cast<size_t>(count++)] = b;
        }
        f.k.clamp_products(f.a.const_data_ptr<float>(), f.a.stride(0), f.g.const_data_ptr<float>() + first,
                           f.g.stride(0), samples.data(), count, last - first, f.width, bound,
                           out + n * sums.stride(0) + first * f.width, f.width);
      }
    });
    return;
  }
  parallel_for(0, runs * f.panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n = unit / f.panels, p = unit % f.panels;
      for (int64_t b = n * each; b < (n + 1) * each; ++b) {
        if (counts != nullptr && !counts[b]) continue;
        f.form(f.packed(b), b, p, [&](const float* tile, int64_t line, int lines, int64_t first, int64_t columns) {
          f.k.clamp_add(tile, f.tile, lines, columns, limit, out + n * sums.stride(0) + line * f.width + first,
                        f.width);
        });
      }
    }
  });
}

namespace {

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
  m.impl("outer_rows", TORCH_BOX(&dpk::outer_rows));
  m.impl("outer_squares", TORCH_BOX(&dpk::outer_squares));
  m.impl("conv_rows", TORCH_BOX(&dpk::conv_rows));
  m.impl("outer_rows_", TORCH_BOX(&dpk::outer_rows_));
  m.impl("conv_rows_", TORCH_BOX(&dpk::conv_rows_));
  m.impl("outer_clamp_sum_", TORCH_BOX(&dpk::outer_clamp_sum_));
  m.impl("conv_clamp_sum_", TORCH_BOX(&dpk::conv_clamp_sum_));
}
