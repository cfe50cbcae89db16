// From dispatcher arguments to what the kernels take. Shapes and types were checked in Python (dpkernels/ops.py).
#pragma once
#include <tuple>

#include "../tensors.h"
#include "blocked_sum.h"

namespace dpk {

// A new contiguous tensor of float64 or float32, not filled.
Tensor empty(const int64_t* sizes, int64_t dimensions, ScalarType type);

// Where each of several stretches behind one another begins, given how many elements each has; and where the last ends.
std::vector<int64_t> ends_of(const Tensor& counts);

// The samples of a tensor as rows in memory.
struct SampleRows {
  const char* data;
  int64_t stride;  // bytes from sample to sample
  int64_t length;
  Element element;
  const char* at(int64_t sample, int64_t start) const {
    return data + sample * stride + start * element_bytes(element);
  }
};

// Of the tensor itself where each sample is contiguous (whatever the stride between samples), else of a copy; `keep`
// holds what must stay alive.
SampleRows sample_rows(const Tensor& t, Tensors& keep);

// The tensor itself where the elements of each line are next to one another, else a copy; t has three dimensions.
inline Tensor with_contiguous_lines(const Tensor& t) { return t.stride(2) == 1 ? t : torch::stable::contiguous(t); }

using Sums = std::tuple<Tensors, Tensor>;
using Rule = std::function<void(int group, int64_t tiles, const double* products, double* coefficient)>;

// Runs blocked_sum on tensor lists; `before` is empty unless the form has one. `tiles` is the number of tiles in the
// group the rule is asked about.
Sums sum_tensors(Form form, const Tensors& now, const Tensors& before, int groups, const Rule& rule,
                 const std::optional<Tensor>& stream, const std::optional<Tensor>& std);

// c = max_norm / max(norm, max_norm), or with a stability constant max_norm / (norm + stability); one bound for
// the row, or one for each tensor.
Sums clipped_sum(Form form, const Tensors& now, const Tensors& before, const Tensor& max_norms,
                 std::optional<double> stability, const std::optional<Tensor>& stream,
                 const std::optional<Tensor>& std);

}  // namespace dpk
