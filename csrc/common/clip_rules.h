// From inner products of a row to the coefficients that clip it, in float64: the same on every device.
//
// Products come from sums over tiles of columns, added in order; they are enlarged by more than the error of that
// before a coefficient is made of them, so that the bound holds in real arithmetic. Torch-free; shared by CPU and CUDA.
#pragma once
#include <cmath>

#include "philox.h"

namespace dpk {

// How products were added up: within tiles of at most `tile` elements, then over `tiles` of them.
struct Chain {
  int64_t tile, tiles;
};

// Additions one after the other: within a tile, over tiles, over lanes and products; twice over, to be safe.
DPK_HOST_DEVICE inline double relative_margin(Chain chain) {
  return static_cast<double>(chain.tile + chain.tiles + 64) * 0x1p-52;
}

// norm^2 enlarged by more than its accumulation and underflow error. May round up to infinity.
DPK_HOST_DEVICE inline double safe_norm2(double norm2, Chain chain) {
  return norm2 * (1.0 + relative_margin(chain)) + static_cast<double>(chain.tiles * chain.tile) * 0x1p-1022;
}

// c = max_norm / max(norm, max_norm), or max_norm / (norm + stability) where `automatic`.
DPK_HOST_DEVICE inline double clip_coefficient(double norm2, Chain chain, double max_norm, bool automatic,
                                               double stability) {
  const double norm = ::sqrt(safe_norm2(norm2, chain));
  if (automatic) return max_norm / (norm + stability);
  return norm > max_norm ? max_norm / norm : 1.0;
}

// The recursive-momentum rows of PriSMA, with a = now, b = before, e = a - b:
//
//   row = g clip_1(a) + (1 - g) clip_3(clip_1(a) - clip_1(b)) = c0 (a - c1 b) + c2 b,   |row| <= g C1 + (1 - g) C3
//
// from products |a|^2, |b|^2, |e|^2, <e, b>, <a, b>, each from its own sum: taken from one another they would lose all
// digits where a and b nearly agree. d = clip_1(a) - clip_1(b) is written through e when e is small, through a and b
// when it is not, and its norm is enlarged by the error of that way before c3 is made from it.
struct MomentumBounds {
  double gradient_norm, difference_norm, momentum;
};

DPK_HOST_DEVICE inline void momentum_coefficients(const MomentumBounds& bounds, Chain chain, const double* products,
                                                  double* coefficient) {
  const double C1 = bounds.gradient_norm, g = bounds.momentum, h = 1.0 - bounds.momentum;
  const double a = ::sqrt(safe_norm2(products[0], chain)), b = ::sqrt(safe_norm2(products[1], chain));
  const double e2 = products[2], eb = products[3], ab = products[4];
  const double e = ::sqrt(safe_norm2(e2, chain));
  const double ca = a > C1 ? C1 / a : 1.0, cb = b > C1 ? C1 / b : 1.0;
  const bool through_e = e <= 0.5 * ::fmin(a, b);
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
  if (!(a <= 0x1.fffffffffffffp1023 && b <= 0x1.fffffffffffffp1023 && e <= 0x1.fffffffffffffp1023 &&
        ::fabs(d2) <= 0x1.fffffffffffffp1023)) {
    coefficient[0] = coefficient[1] = coefficient[2] = 0.0;  // like a row whose products overflow
    return;
  }
  const double terms = ca * (through_e ? e : a) + ::fabs(second) * b;
  const double d = ::sqrt(::fmax(d2, 0.0) + relative_margin(chain) * terms * terms);
  const double c3 = d > bounds.difference_norm ? bounds.difference_norm / d : 1.0;
  coefficient[0] = g * ca + h * c3 * ca;
  coefficient[1] = through_e ? 1.0 : 0.0;
  coefficient[2] = h * c3 * second + (through_e ? g * ca : 0.0);
}

}  // namespace dpk
