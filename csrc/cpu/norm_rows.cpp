// layer_norm_rows and group_norm_rows: the backward of a normalisation, rows and input gradient (norm_rows.h).
#include "norm_rows.h"

#include "arguments.h"
#include "isa.h"
#include "parallel.h"
#if DPK_HAVE_X86_VARIANTS
#include <immintrin.h>
#endif

#define DPK_KERNEL_FILE "norm_rows_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const NormRowKernels& norm_row_kernels() {
  static constexpr NormRowKernels tables[] = {
      portable::norm_rows::table,
#if DPK_HAVE_X86_VARIANTS
      avx2::norm_rows::table,
      avx512::norm_rows::table,
#endif
  };
  return tables[static_cast<int>(active_isa())];
}

namespace {

const float* data_of(const std::optional<Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

// A tensor like x for its gradient, or an empty one.
Tensor gradient_like(const Tensor& x, bool wanted) {
  const int64_t sizes[] = {wanted ? x.size(0) : 0, x.size(1), x.size(2)};
  return empty(sizes, 3, ScalarType::Float);
}

}  // namespace

// x and g [B, T, width], w [width]
std::tuple<Tensor, Tensor, Tensor> layer_norm_rows(const Tensor& x_given, const Tensor& g_given,
                                                   const std::optional<Tensor>& w, double epsilon,
                                                   bool input_gradient) {
  const Tensor x = torch::stable::contiguous(x_given), g = torch::stable::contiguous(g_given);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2), sizes[] = {batch, width};
  Tensor scale = empty(sizes, 2, ScalarType::Float), shift = empty(sizes, 2, ScalarType::Float);
  Tensor dx = gradient_like(x, input_gradient);
  const auto *x_data = x.const_data_ptr<float>(), *g_data = g.const_data_ptr<float>(), *w_data = data_of(w);
  auto *scale_data = scale.mutable_data_ptr<float>(), *shift_data = shift.mutable_data_ptr<float>();
  auto* dx_data = input_gradient ? dx.mutable_data_ptr<float>() : nullptr;
  const auto kernel = norm_row_kernels().over_last;
  parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t at = b * count * width;
      kernel(x_data + at, g_data + at, w_data, count, width, static_cast<float>(epsilon),
             dx_data == nullptr ? nullptr : dx_data + at, scale_data + b * width, shift_data + b * width);
    }
  });
  return {dx, scale, shift};
}

// x and g [N, C, places], w [C]
std::tuple<Tensor, Tensor, Tensor> group_norm_rows(const Tensor& x_given, const Tensor& g_given,
                                                   const std::optional<Tensor>& w, int64_t groups, double epsilon,
                                                   bool input_gradient) {
  const Tensor x = torch::stable::contiguous(x_given), g = torch::stable::contiguous(g_given);
  const int64_t batch = x.size(0), channels = x.size(1), places = x.size(2), sizes[] = {batch, channels};
  const int64_t each = channels / groups;
  Tensor scale = empty(sizes, 2, ScalarType::Float), shift = empty(sizes, 2, ScalarType::Float);
  Tensor dx = gradient_like(x, input_gradient);
  const auto *x_data = x.const_data_ptr<float>(), *g_data = g.const_data_ptr<float>(), *w_data = data_of(w);
  auto *scale_data = scale.mutable_data_ptr<float>(), *shift_data = shift.mutable_data_ptr<float>();
  auto* dx_data = input_gradient ? dx.mutable_data_ptr<float>() : nullptr;
  const auto kernel = norm_row_kernels().over_channels;
  parallel_for(0, batch * groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * each * places;
      kernel(x_data + at, g_data + at, w_data == nullptr ? nullptr : w_data + i % groups * each, each, places,
             static_cast<float>(epsilon), dx_data == nullptr ? nullptr : dx_data + at, scale_data + i * each,
             shift_data + i * each);
    }
  });
  return {dx, scale, shift};
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("layer_norm_rows", TORCH_BOX(&dpk::layer_norm_rows));
  m.impl("group_norm_rows", TORCH_BOX(&dpk::group_norm_rows));
}
