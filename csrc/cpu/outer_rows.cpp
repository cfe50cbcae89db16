// outer_rows and outer_squares: each sample's weight gradient of a linear layer and its norm^2 (weight_rows.h). With an
// underscore: added onto weights of its own, or clamped and added to the sum of a run of samples.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "formed_rows.h"
#include "parallel.h"
#include "pooled_floats.h"
#include "scratch.h"
#include "weight_rows.h"

namespace dpk {
namespace {

constexpr int64_t places_at_a_time = 256;  // a packed run of this many places fits the first-level cache
constexpr int64_t lines_at_a_time = 8;     // copied into blocks

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

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("outer_rows", TORCH_BOX(&dpk::outer_rows));
  m.impl("outer_squares", TORCH_BOX(&dpk::outer_squares));
  m.impl("outer_rows_", TORCH_BOX(&dpk::outer_rows_));
  m.impl("outer_clamp_sum_", TORCH_BOX(&dpk::outer_clamp_sum_));
}
