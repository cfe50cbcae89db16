// The vector code behind max_pool.h.
namespace dpk::DPK_ISA {
namespace max_pool {

#include "simd.h"

typedef uint8_t Bytes __attribute__((vector_size(DPK_LANES)));

// bordered[r][q][j] = x[r - padding][q + stride j - padding], -inf outside of the image
inline void copy(const Pooling& p, const float* x, float* bordered) {
  const float outside = -__builtin_inff();
  const int64_t step = p.stride[1];
  for (int64_t r = 0; r < p.rows; ++r, bordered += step * p.pitch) {
    const int64_t row = r - p.padding[0];
    const bool inside = row >= 0 && row < p.height;
    const float* from = x + row * p.width;
    for (int64_t q = 0; q < step; ++q) {
      float* to = bordered + q * p.pitch;
      const int64_t shift = q - p.padding[1];  // to[j] is column shift + step j
      int64_t j = 0;
      const int64_t begin = shift < 0 ? (step - 1 - shift) / step : 0;
      const int64_t end = inside && shift < p.width ? (p.width - shift + step - 1) / step : 0;
      for (; j < p.pitch && (j < begin || !inside); ++j) to[j] = outside;
      if (step == 1) {
        for (; j < p.pitch && j < end; ++j) to[j] = from[shift + j];
      } else {
        for (; j < p.pitch && j < end; ++j) to[j] = from[shift + step * j];
      }
      for (; j < p.pitch; ++j) to[j] = outside;
    }
  }
}

void plane(const Pooling& p, const float* x, float* bordered, float* y, uint8_t* where) {
  if (bordered != nullptr) copy(p, x, bordered);
  const float* source = bordered == nullptr ? x : bordered;
  const int64_t count = p.kernel[0] * p.kernel[1], elements = p.out_height * p.out_width;
  for (int64_t row = 0; row < p.out_height; ++row) {
    const float* window = source + row * p.stride[0] * p.stride[1] * p.pitch;
    const int64_t above = p.padding[0] - row * p.stride[0];  // rows of the window that are not in the image
    const auto start = static_cast<int32_t>(above > 0 ? above * p.kernel[1] : 0);
    for (int64_t column = 0; column < p.out_width; column += lanes) {
      Floats best = Floats{} - __builtin_inff();
      Ints code = load<Ints>(p.first + column) + start;
      for (int64_t k = 0; k < count; ++k) {
        const Floats value = load<Floats>(window + p.offset[k] + column);
        const Ints larger = (value > best) | (value != value);
        best = larger ? value : best;
        code = larger ? Ints{} + static_cast<int32_t>(k) : code;
      }
      const Bytes bytes = __builtin_convertvector(code, Bytes);
      const int64_t at = row * p.out_width + column;
      if (at + lanes <= elements) {  // what is written beyond this row is written again
        store(y + at, best);
        store(where + at, bytes);
      } else {
        for (int64_t l = 0; l < p.out_width - column && l < lanes; ++l) {
          y[at + l] = best[l];
          where[at + l] = bytes[l];
        }
      }
    }
  }
}

constexpr MaxPoolKernels table = {plane};

}  // namespace max_pool
}  // namespace dpk::DPK_ISA
