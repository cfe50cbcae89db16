// clip_momentum_sum: the recursive-momentum rows of PriSMA, with a = now, b = before, e = a - b:
//
//   row = g clip_1(a) + (1 - g) clip_3(clip_1(a) - clip_1(b)),   |row| <= g C1 + (1 - g) C3
//
// Norms and inner products come in float64 from one pass, |a|, |b| and |e| each from its own sum: taken from
// one another they would lose all digits where a and b nearly agree. d = clip_1(a) - clip_1(b) is written
// through e when e is small, through a and b when it is not, and its norm is enlarged by the error of that
// way before c3 is made from it (blocked_sum.h, relative_margin).
#include <cmath>

#include "arguments.h"

namespace dpk {
namespace {

struct Bounds {
  double gradient_norm, difference_norm, momentum;
};

void momentum_rule(const Bounds& bounds, int64_t tiles, const double* products, double* coefficient) {
  const double C1 = bounds.gradient_norm, g = bounds.momentum, h = 1.0 - bounds.momentum;
  const double a = std::sqrt(safe_norm2(products[0], tiles)), b = std::sqrt(safe_norm2(products[1], tiles));
  const double e2 = products[2], eb = products[3], ab = products[4];
  const double e = std::sqrt(safe_norm2(e2, tiles));
  const double ca = a > C1 ? C1 / a : 1.0, cb = b > C1 ? C1 / b : 1.0;
  const bool through_e = e <= 0.5 * std::fmin(a, b);
  // d = first * x + second * b, with x = e or a
  double second, d2;
  if (through_e) {
    if (a <= C1 && b <= C1) {
      second = 0.0;
    } else if (a > C1 && b > C1) {
      second = C1 * (-(2.0 * eb + e2) / (a + b)) / (a * b);
    } else {
      second = a > C1 ? (C1 - a) / a : (b - C1) / b;
    }
    d2 = ca * ca * e2 + 2.0 * ca * second * eb + second * second * products[1];
  } else {
    second = -cb;
    d2 = ca * ca * products[0] - 2.0 * ca * cb * ab + cb * cb * products[1];
  }
  if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(e) || !std::isfinite(d2)) {
    coefficient[0] = coefficient[1] = coefficient[2] = 0.0;  // like a row whose products overflow
    return;
  }
  const double terms = ca * (through_e ? e : a) + std::fabs(second) * b;
  const double d = std::sqrt(std::fmax(d2, 0.0) + relative_margin(tiles) * terms * terms);
  const double c3 = d > bounds.difference_norm ? bounds.difference_norm / d : 1.0;
  coefficient[0] = g * ca + h * c3 * ca;
  coefficient[1] = through_e ? 1.0 : 0.0;
  coefficient[2] = h * c3 * second + (through_e ? g * ca : 0.0);
}

}  // namespace

Sums clip_momentum_sum(const Tensors& now, const Tensors& before, const Tensor& bounds,
                       const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  const double* b = bounds.const_data_ptr<double>();
  const Bounds values{b[0], b[1], b[2]};
  const Rule rule = [=](int, int64_t tiles, const double* products, double* coefficient) {
    momentum_rule(values, tiles, products, coefficient);
  };
  return sum_tensors(Form::momentum, now, before, 1, rule, stream, std);
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("clip_momentum_sum", TORCH_BOX(&dpk::clip_momentum_sum)); }
