// max_pool: the largest of each window of an image, and where in its window it is.
//
//   y[o]     = max over k of x[o * stride + k - padding]      k in [kernel rows][kernel columns], row by row
//   where[o] = the k of it, a byte; of several the first. A NaN is larger than all, of several NaNs the last
//   dx[i]    = sum over windows o whose largest is x[i], in order, of g[o]
//
// x [N, C, H, W] in float32. Values and ties are those of torch's own max_pool2d, whose loop over single elements takes
// half of the step of a small network here; a byte is kept for the backward, where torch keeps eight. A plane is copied
// into the first-level cache with a border of -inf and its columns sorted by their remainder of the stride, so that
// windows of neighbours are neighbours in memory; windows that are so by themselves are read where they are. Planes are
// independent: bits do not depend on the number of threads.
// Limit: one read of x and one write of y.
#pragma once
#include <cstdint>

namespace dpk {

struct Pooling {  // of a plane [height, width] to one [out_height, out_width]
  int64_t height, width, out_height, out_width;
  int64_t kernel[2], stride[2], padding[2];
  // The bordered copy: [rows][stride][pitch], or the image itself if there is none; and where in it the elements of a
  // window are from its first one on.
  int64_t rows, pitch;
  const int64_t* offset;
  const int32_t* first;  // column in the window of its first element that is in the image, for each output column
};

struct MaxPoolKernels {
  void (*plane)(const Pooling& p, const float* x, float* bordered, float* y, uint8_t* where);
};

const MaxPoolKernels& max_pool_kernels();

}  // namespace dpk
