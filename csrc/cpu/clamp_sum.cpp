// clamp_sum: sum_i min(max(v_i, -bound), bound) + noise, coordinate by coordinate (blocked_sum.h).
#include "arguments.h"

namespace dpk {

Sums clamp_sum(const Tensors& vectors, const Tensor& bound, const std::optional<Tensor>& stream,
               const std::optional<Tensor>& std) {
  const double limit = *bound.const_data_ptr<double>();
  const Rule rule = [=](int, int64_t, const double*, double* coefficient) { coefficient[0] = limit; };
  return sum_tensors(Form::clamp, vectors, {}, 1, rule, stream, std);
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("clamp_sum", TORCH_BOX(&dpk::clamp_sum)); }
