// clip_sum: sum_i c_i v_i + noise, c_i from the norm of row i (blocked_sum.h).
#include "arguments.h"

namespace dpk {

Sums clip_sum(const Tensors& vectors, const Tensor& max_norms, std::optional<double> stability,
              const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  return clipped_sum(Form::single, vectors, {}, max_norms, stability, stream, std);
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("clip_sum", TORCH_BOX(&dpk::clip_sum)); }
