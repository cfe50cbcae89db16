// outer_rows, outer_squares and conv_rows: each sample's weight gradient and its norm^2 (weight_rows.h). With an
// underscore: added onto weights of its own.
#include "weight_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "convolution.h"
#include "parallel.h"
#include "pool.h"
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

// The squares, unless rows are added onto others.
Tensor form_outer(const Tensor& a_given, const Tensor& g_given, const Destination& out) {
  const Tensor a = with_contiguous_lines(a_given), g = with_contiguous_lines(g_given);
  const int64_t batch = a.size(0), length = a.size(1), width = a.size(2), height = g.size(2);
  const WeightRowKernels& k = weight_row_kernels();
  const auto* a_data = a.const_data_ptr<float>();
  const auto* g_data = g.const_data_ptr<float>();
  const bool past_caches = many(batch * height * width);
  const int64_t tile = tile_vectors * k.lanes, panels = divide_up(width, tile),
                vectors_in_all = divide_up(width, k.lanes);
  const auto panel_start = [&](int64_t p) { return p * vectors_in_all / panels * k.lanes; };  // about equally wide
  const int64_t blocks = divide_up(height, k.block);
  const int64_t parts = parts_of(batch, panels);
  std::vector<double> squares(static_cast<size_t>(batch * panels), 0.0);
  parallel_for(0, batch * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / parts, part = unit % parts;
      float* packed = scratch(0, blocks * length * k.block);   // [blocks][length][block]
      for (int64_t t = 0; t < length; t += lines_at_a_time) {  // a few lines of all blocks: reads and writes in runs
        const int64_t count = std::min(lines_at_a_time, length - t);
        const float* from = g_data + b * g.stride(0) + t * g.stride(1);
        for (int64_t i = 0; i < height; i += k.block) {
          k.pack(from + i, g.stride(1), count, std::min<int64_t>(k.block, height - i),
                 packed + i * length + t * k.block, k.block, k.block);
        }
      }
      float* panel = scratch(1, places_at_a_time * tile);
      float* tiles = scratch(2, blocks * k.block * tile);
      for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; ++p) {
        double& square = squares[static_cast<size_t>(b * panels + p)];
        const int64_t first = panel_start(p), columns = std::min(panel_start(p + 1), width) - first;
        const int64_t vectors = divide_up(columns, k.lanes), run = vectors * k.lanes;
        for (int64_t t0 = 0; t0 < length || t0 == 0; t0 += places_at_a_time) {
          const int64_t count = std::min(places_at_a_time, length - t0);
          k.pack(a_data + b * a.stride(0) + t0 * a.stride(1) + first, a.stride(1), count, columns, panel, run, run);
          const Walk walk{{1, 1, count}, {0, 0, run}};
          for (int64_t i = 0; i < height; i += k.block) {
            const int lines = static_cast<int>(std::min<int64_t>(k.block, height - i));
            float* at = tiles + i * tile;
            k.product(packed + i * length + t0 * k.block, lines, panel, static_cast<int>(vectors), walk, at, tile,
                      t0 > 0);
            if (t0 + count < length) continue;
            square += out.put(k, at, tile, lines, columns, (b * height + i) * width + first, width, past_caches);
          }
        }
      }
    }
    fence();
  });
  return sum_of_parts(squares, batch);
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

namespace {

// One sample's group with channels last, within zeros.
void pack_inputs(const Convolution& s, const Three& padded, const WeightRowKernels& k, const float* x, float* packed) {
  const int64_t plane = s.in[1] * s.in[2], line = padded[2] * s.inputs;
  if (padded != s.in) std::fill_n(packed, padded[0] * padded[1] * line, 0.0f);
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
          const int64_t vectors = std::min<int64_t>(tile_vectors, divide_up(run - first, k.lanes));
          bool onto = false;
          for (int64_t z = 0; z < s.out[0]; ++z) {
            for (int64_t y = 0; y < s.out[1]; y += rows_at_a_time) {
              const Walk walk{{1, std::min(rows_at_a_time, s.out[1] - y), s.out[2]},
                              {0, s.stride[1] * line, s.stride[2] * s.inputs}};
              k.product(g + (z * s.out[1] + y) * s.out[2] * k.block, lines,
                        from + z * s.stride[0] * plane + y * s.stride[1] * line + first, static_cast<int>(vectors),
                        walk, to + first, tile_stride, onto);
              onto = true;
            }
          }
        }
      }
    }
  }
}

Tensor form_conv(const Tensor& x_given, const Tensor& g_given, const Three& kernel, const std::vector<int64_t>& stride,
                 const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups,
                 const Destination& out) {
  const Tensor x = torch::stable::contiguous(x_given), g = torch::stable::contiguous(g_given);
  const Convolution s{x.size(0),       groups, x.size(1) / groups, g.size(1) / groups, places_of(x, 2),
                      places_of(g, 2), kernel, three(stride, 1),   three(padding, 0),  three(dilation, 1)};
  Three padded = s.reach();
  for (size_t d = 0; d < 3; ++d) padded[d] = std::max(s.in[d] + s.padding[d], padded[d]);
  const WeightRowKernels& k = weight_row_kernels();
  const auto* x_data = x.const_data_ptr<float>();
  const auto* g_data = g.const_data_ptr<float>();
  const int64_t taps = product_of(kernel), places = product_of(s.out);
  const bool past_caches = many(s.batch * g.size(1) * s.inputs * taps);
  const int64_t in_places = product_of(s.in), row = taps * s.inputs, slack = tile_vectors * k.lanes;
  const int64_t packed_floats = product_of(padded) * s.inputs + slack;
  const int64_t blocks = divide_up(s.outputs, k.block), samples_groups = s.batch * groups;
  const int64_t parts = parts_of(samples_groups, blocks);
  std::vector<double> squares(static_cast<size_t>(samples_groups * blocks), 0.0);
  parallel_for(0, samples_groups * parts, 1, [&](int64_t begin, int64_t end) {
    int64_t packed_for = -1;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t group = unit / parts, part = unit % parts;  // of all groups of all samples
      float* packed = scratch(0, packed_floats);
      if (group != packed_for) pack_inputs(s, padded, k, x_data + group * s.inputs * in_places, packed);
      packed_for = group;
      float* g_packed = scratch(1, places * k.block);
      float* tile = scratch(2, k.block * (row + slack));
      float* turned = scratch(3, row);
      for (int64_t b = blocks * part / parts; b < blocks * (part + 1) / parts; ++b) {
        double& square = squares[static_cast<size_t>(group * blocks + b)];
        const int64_t first = b * k.block;
        const int lines = static_cast<int>(std::min<int64_t>(k.block, s.outputs - first));
        k.interleave(g_data + (group * s.outputs + first) * places, places, lines, places, g_packed, k.block);
        if (places == 0) std::fill_n(tile, lines * (row + slack), 0.0f);
        conv_tile(s, padded, k, g_packed, lines, packed, tile, row + slack);
        for (int m = 0; m < lines; ++m) {
          const float* from = tile + m * (row + slack);
          if (taps > 1) {
            k.interleave(from, s.inputs, static_cast<int>(taps), s.inputs, turned, taps);
            from = turned;
          }
          square += out.put(k, from, row, 1, row, (group * s.outputs + first + m) * row, row, past_caches);
        }
      }
    }
    fence();
  });
  return sum_of_parts(squares, s.batch);
}

}  // namespace

std::tuple<Tensor, Tensor> conv_rows(const Tensor& x, const Tensor& g, std::vector<int64_t> kernel,
                                     std::vector<int64_t> stride, std::vector<int64_t> padding,
                                     std::vector<int64_t> dilation, int64_t groups) {
  std::vector<int64_t> sizes{x.size(0), g.size(1), x.size(1) / groups};
  sizes.insert(sizes.end(), kernel.begin(), kernel.end());
  Tensor rows = pooled_floats(sizes);
  Tensor squares =
      form_conv(x, g, three(kernel, 1), stride, padding, dilation, groups, {rows.mutable_data_ptr<float>()});
  return {rows, squares};
}

void conv_rows_(Tensor rows, const Tensor& x, const Tensor& g, double scale, std::vector<int64_t> stride,
                std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  STD_TORCH_CHECK(rows.dim() == x.dim() + 1 && rows.size(0) == x.size(0) && rows.size(1) == g.size(1) &&
                      rows.size(2) == x.size(1) / groups && g.size(0) == x.size(0),
                  "conv_rows_: sizes do not fit together");
  form_conv(x, g, places_of(rows, 3), stride, padding, dilation, groups,
            {rows.mutable_data_ptr<float>(), true, static_cast<float>(scale)});
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("outer_rows", TORCH_BOX(&dpk::outer_rows));
  m.impl("outer_squares", TORCH_BOX(&dpk::outer_squares));
  m.impl("conv_rows", TORCH_BOX(&dpk::conv_rows));
  m.impl("outer_rows_", TORCH_BOX(&dpk::outer_rows_));
  m.impl("conv_rows_", TORCH_BOX(&dpk::conv_rows_));
}
