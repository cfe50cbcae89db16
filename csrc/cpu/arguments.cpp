#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dpk {

std::vector<int64_t> ends_of(const Tensor& counts) {
  const int64_t number = counts.numel();
  const auto* count = counts.const_data_ptr<int64_t>();
  STD_TORCH_CHECK(counts.is_contiguous() && std::all_of(count, count + number, [](int64_t n) { return n >= 0; }),
                  "counts: must be contiguous, and none negative");
  std::vector<int64_t> ends(static_cast<size_t>(number + 1), 0);
  std::partial_sum(count, count + number, ends.begin() + 1);
  return ends;
}

SampleRows sample_rows(const Tensor& t, Tensors& keep) {
  const Tensor& own = keep.emplace_back(with_contiguous_samples(t));
  const Element element = element_of(own);
  const int64_t stride = own.stride(0) * element_bytes(element);
  return {static_cast<const char*>(own.const_data_ptr()), stride, sample_length(own), element};
}

// torch::stable::new_empty looks its operator up by name; over hundreds of tensors that shows.
Tensor empty(const int64_t* sizes, int64_t dimensions, ScalarType type) {
  std::vector<int64_t> strides(static_cast<size_t>(dimensions), 1);
  for (int64_t d = dimensions - 2; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = strides[static_cast<size_t>(d + 1)] * std::max<int64_t>(sizes[d + 1], 1);
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dimensions, sizes, strides.data(),
                               type == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(),
                               aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Sums sum_tensors(Form form, const Tensors& now, const Tensors& before, int groups, const Rule& rule,
                 const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  const int64_t batch = now[0].size(0);
  Tensors keep;  // copies stay alive until the sum is done
  keep.reserve(now.size() + before.size());
  Tensors out;
  out.reserve(now.size());
  SumProblem problem{form, batch, {}, groups, noise_of(stream, std), nullptr, {}};
  problem.columns.reserve(now.size());
  std::vector<int64_t> group_tiles(static_cast<size_t>(groups), 0);
  bool wide_norms = false;
  for (size_t i = 0; i < now.size(); ++i) {
    const SampleRows a = sample_rows(now[i], keep);
    wide_norms = wide_norms || a.element == Element::f64;
    const auto sizes = now[i].sizes();
    out.push_back(empty(sizes.data() + 1, static_cast<int64_t>(sizes.size()) - 1, wide_type(now[i])));
    Column column{a.data, nullptr, a.stride, 0, out.back().mutable_data_ptr(), a.length, a.element};
    if (!before.empty()) {
      const SampleRows b = sample_rows(before[i], keep);
      column.before = b.data;
      column.before_stride = b.stride;
    }
    problem.columns.push_back(column);
    group_tiles[groups > 1 ? i : 0] += tiles_of(a.length);
  }
  Tensor norms = empty(&batch, 1, ScalarType::Double);
  problem.norms = norms.mutable_data_ptr<double>();
  problem.rule = [&](int group, const double* products, double* coefficient) {
    rule(group, group_tiles[static_cast<size_t>(group)], products, coefficient);
  };
  blocked_sum(problem);
  if (!wide_norms) norms = torch::stable::to(norms, ScalarType::Float);
  return {std::move(out), norms};
}

Sums clipped_sum(Form form, const Tensors& now, const Tensors& before, const Tensor& max_norms,
                 std::optional<double> stability, const std::optional<Tensor>& stream,
                 const std::optional<Tensor>& std) {
  const double* bound = max_norms.const_data_ptr<double>();
  const Rule rule = [=](int group, int64_t tiles, const double* products, double* coefficient) {
    coefficient[0] = clip_coefficient(products[0], {tile_elements, tiles}, bound[group], stability.has_value(),
                                      stability.value_or(0.0));
  };
  return sum_tensors(form, now, before, static_cast<int>(max_norms.numel()), rule, stream, std);
}

}  // namespace dpk
