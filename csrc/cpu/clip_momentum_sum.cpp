// clip_momentum_sum: the recursive-momentum rows of PriSMA (../common/clip_rules.h), summed over samples.
#include "arguments.h"

namespace dpk {

Sums clip_momentum_sum(const Tensors& now, const Tensors& before, const Tensor& bounds,
                       const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  const double* b = bounds.const_data_ptr<double>();
  const MomentumBounds values{b[0], b[1], b[2]};
  const Rule rule = [=](int, int64_t tiles, const double* products, double* coefficient) {
    momentum_coefficients(values, {tile_elements, tiles}, products, coefficient);
  };
  return sum_tensors(Form::momentum, now, before, 1, rule, stream, std);
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("clip_momentum_sum", TORCH_BOX(&dpk::clip_momentum_sum)); }
