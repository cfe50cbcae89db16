// dense_difference: row_b = w_b x_b - v_b y_b in float32, and its norm^2 in float64 (rows.h). A sample's term
// of weight zero is left out by selection: it may hold anything. Limit: one read of both and one write.
#include <algorithm>

#include "arguments.h"
#include "parallel.h"
#include "pooled_floats.h"

namespace dpk {

std::tuple<Tensor, Tensor> dense_difference(const Tensor& x, const Tensor& y, const std::optional<Tensor>& x_weights,
                                            const std::optional<Tensor>& y_weights) {
  static const float zeros[tile_elements] = {};
  Tensors keep;
  keep.reserve(2);
  const SampleRows a = sample_rows(x, keep), b = sample_rows(y, keep);
  const int64_t batch = x.size(0);
  STD_TORCH_CHECK(y.size(0) == batch && a.length == b.length && a.element == Element::f32 &&
                      b.element == Element::f32 &&
                      (!x_weights || (x_weights->numel() == batch && x_weights->is_contiguous())) &&
                      (!y_weights || (y_weights->numel() == batch && y_weights->is_contiguous())),
                  "dense_difference: sizes do not fit together");
  const auto* w = x_weights ? x_weights->const_data_ptr<double>() : nullptr;
  const auto* v = y_weights ? y_weights->const_data_ptr<double>() : nullptr;
  const auto sizes = x.sizes();
  Tensor rows = pooled_floats({sizes.begin(), sizes.end()}), squares = empty(&batch, 1, ScalarType::Double);
  auto* out = rows.mutable_data_ptr<float>();
  auto* square = squares.mutable_data_ptr<double>();
  const auto kernel = row_kernels().difference;
  parallel_for(0, batch, (int64_t{1} << 15) / (a.length + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double scale = w ? w[i] : 1.0, other = v ? v[i] : 1.0;
      square[i] = 0.0;
      for (int64_t start = 0; start < a.length; start += tile_elements) {
        const auto *first = reinterpret_cast<const float*>(a.at(i, start)),
                   *second = reinterpret_cast<const float*>(b.at(i, start));
        square[i] += kernel(out + i * a.length + start, scale != 0.0 ? first : zeros, other != 0.0 ? second : zeros,
                            std::min(tile_elements, a.length - start), scale, other);
      }
    }
  });
  return {rows, squares};
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("dense_difference", TORCH_BOX(&dpk::dense_difference)); }
