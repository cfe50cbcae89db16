// row_squares: the norm^2 of each sample's row in each tensor of a list, in float64 (rows.h).
// lookup_squares: that of rows which are lines added up by id, row_b = sum_t e_(ids_bt) g_bt^T.
#include <algorithm>
#include <numeric>

#include "arguments.h"
#include "parallel.h"

namespace dpk {

Tensor row_squares(const Tensors& tensors) {
  const int64_t batch = tensors[0].size(0), count = static_cast<int64_t>(tensors.size()), sizes[] = {batch, count};
  Tensor squares = empty(sizes, 2, ScalarType::Double);
  auto* out = squares.mutable_data_ptr<double>();
  Tensors keep;
  std::vector<SampleRows> columns;
  int64_t width = 0;
  for (const Tensor& t : tensors) width += columns.emplace_back(sample_rows(t, keep)).length;
  const auto& gram = row_kernels().gram[static_cast<int>(Form::single)];
  const int64_t grain = (int64_t{1} << 15) / (width / count + 1) + 1;
  parallel_for(0, count * batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t c = i / batch, b = i % batch;
      const SampleRows& column = columns[static_cast<size_t>(c)];
      const auto kernel = gram[static_cast<int>(column.element)];
      double total = 0.0;
      for (int64_t start = 0; start < column.length; start += tile_elements) {
        double partial;
        kernel(column.at(b, start), nullptr, std::min(tile_elements, column.length - start), &partial);
        total += partial;
      }
      out[b * count + c] = total;
    }
  });
  return squares;
}

Tensor lookup_squares(const Tensor& ids_given, const Tensor& g_given) {
  const Tensor ids = torch::stable::contiguous(ids_given), g = torch::stable::contiguous(g_given);
  const int64_t batch = g.size(0), length = g.size(1), width = g.size(2);
  Tensor squares = empty(&batch, 1, ScalarType::Double);
  auto* out = squares.mutable_data_ptr<double>();
  const auto* id_data = ids.const_data_ptr<int64_t>();
  const auto* g_data = g.const_data_ptr<float>();
  parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> order(static_cast<size_t>(length));
    std::vector<double> line(static_cast<size_t>(width));
    for (int64_t b = begin; b < end; ++b) {
      const int64_t* id = id_data + b * length;
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return id[i] < id[j]; });
      double total = 0.0;
      for (size_t i = 0; i < order.size();) {
        const int64_t which = id[order[i]];
        std::fill(line.begin(), line.end(), 0.0);
        for (; i < order.size() && id[order[i]] == which; ++i) {
          const float* from = g_data + (b * length + order[i]) * width;
          for (size_t j = 0; j < line.size(); ++j) line[j] += static_cast<double>(from[j]);
        }
        for (const double value : line) total += value * value;
      }
      out[b] = total;
    }
  });
  return squares;
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("row_squares", TORCH_BOX(&dpk::row_squares));
  m.impl("lookup_squares", TORCH_BOX(&dpk::lookup_squares));
}
