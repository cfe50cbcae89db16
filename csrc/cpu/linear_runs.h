// Lines of N equal runs times the weights of each: y = x w^T for x [lines, width], w [height, width]. float32.
//
// One sum for each element of y, in the same order wherever its line is, so that a line's bits depend on it alone.
// Four lines by four outputs are summed in registers; the weights of a run stay in the nearest cache if they are small.
// Limit: arithmetic, or one read of x.
#pragma once
#include <cstdint>

namespace dpk {

struct LinearRunKernels {
  void (*product)(const float* x, int64_t x_stride, int64_t lines, const float* w, int64_t w_stride, int64_t height,
                  int64_t width, float* y);
  // 0 if n floats are finite, else NaN
  float (*fault)(const float* x, int64_t n);
};

const LinearRunKernels& linear_run_kernels();

}  // namespace dpk
