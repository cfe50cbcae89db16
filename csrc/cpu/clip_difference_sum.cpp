// clip_difference_sum: sum_i c_i (a_i - b_i) + noise, c_i from the norm of the difference. The difference is
// formed in registers from the inputs, in float64: nothing cancels and nothing is stored (blocked_sum.h).
#include "arguments.h"

namespace dpk {

Sums clip_difference_sum(const Tensors& now, const Tensors& before, const Tensor& max_norms,
                         std::optional<double> stability, const std::optional<Tensor>& stream,
                         const std::optional<Tensor>& std) {
  return clipped_sum(Form::difference, now, before, max_norms, stability, stream, std);
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("clip_difference_sum", TORCH_BOX(&dpk::clip_difference_sum)); }
