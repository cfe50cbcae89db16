// layer_norm_rows and group_norm_rows: the backward of a normalisation, rows and input gradient (norm_rows.h).
#include "norm_rows.h"

#include <algorithm>

#include "arguments.h"
#include "parallel.h"

#define DPK_KERNEL_FILE "norm_rows_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const NormRowKernels& norm_row_kernels() {
  static constexpr NormRowKernels tables[] = DPK_TABLES(norm_rows);
  return tables[static_cast<int>(active_isa())];
}

namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;  // the gradient of x, or an empty tensor; rows of scale and of shift

// Calls run(i, x, g, dx, scale, shift) for each of `units` equal parts of x and g [B, ...], which have as equal parts
// of the rows [B, columns].
template <class Run>
Three in_units(const Tensor& x_given, const Tensor& g_given, int64_t columns, int64_t units, bool input_gradient,
               const Run& run) {
  const Tensor x = torch::stable::contiguous(x_given), g = torch::stable::contiguous(g_given);
  const int64_t rows[] = {x.size(0), columns}, like[] = {input_gradient ? x.size(0) : 0, x.size(1), x.size(2)};
  Tensor scale = empty(rows, 2, ScalarType::Float), shift = empty(rows, 2, ScalarType::Float);
  Tensor dx = empty(like, 3, ScalarType::Float);
  const auto *x_data = x.const_data_ptr<float>(), *g_data = g.const_data_ptr<float>();
  auto *scale_data = scale.mutable_data_ptr<float>(), *shift_data = shift.mutable_data_ptr<float>();
  auto* dx_data = input_gradient ? dx.mutable_data_ptr<float>() : nullptr;
  const int64_t step = x.numel() / std::max<int64_t>(units, 1), own = scale.numel() / std::max<int64_t>(units, 1);
  parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run(i, x_data + i * step, g_data + i * step, dx_data == nullptr ? nullptr : dx_data + i * step,
          scale_data + i * own, shift_data + i * own);
    }
  });
  return {dx, scale, shift};
}

// The scales of a sample from the `first` on, where w is [B, n]; those of all samples where it is [n].
const float* scales_of(const std::optional<Tensor>& w, int64_t sample, int64_t first) {
  if (!w) return nullptr;
  return w->const_data_ptr<float>() + (w->dim() == 2 ? sample * w->size(1) : 0) + first;
}

}  // namespace

// x and g [B, T, width], w [width] or [B, width]
Three layer_norm_rows(const Tensor& x, const Tensor& g, const std::optional<Tensor>& w, double epsilon,
                      bool input_gradient) {
  const int64_t count = x.size(1), width = x.size(2);
  const auto kernel = norm_row_kernels().over_last;
  return in_units(x, g, width, x.size(0), input_gradient,
                  [&](int64_t b, const float* in, const float* grad, float* dx, float* scale, float* shift) {
                    kernel(in, grad, scales_of(w, b, 0), count, width, static_cast<float>(epsilon), dx, scale, shift);
                  });
}

// x and g [N, C, places], w [C] or [N, C]
Three group_norm_rows(const Tensor& x, const Tensor& g, const std::optional<Tensor>& w, int64_t groups, double epsilon,
                      bool input_gradient) {
  const int64_t each = x.size(1) / groups, places = x.size(2);
  const auto kernel = norm_row_kernels().over_channels;
  return in_units(x, g, x.size(1), x.size(0) * groups, input_gradient,
                  [&](int64_t i, const float* in, const float* grad, float* dx, float* scale, float* shift) {
                    const float* own = scales_of(w, i / groups, i % groups * each);
                    kernel(in, grad, own, each, places, static_cast<float>(epsilon), dx, scale, shift);
                  });
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("layer_norm_rows", TORCH_BOX(&dpk::layer_norm_rows));
  m.impl("group_norm_rows", TORCH_BOX(&dpk::group_norm_rows));
}
