// The backward of a normalisation y = w n + b, n = normalised(x): each sample's own gradient of scale and shift, and
// the gradient of the input, while input and output gradient are in cache.
//
//   scale_b[j] = sum over places of g n,   shift_b[j] = sum over places of g
//   dx = (w g - mean(w g) - n mean(w g n)) / deviation,   means over what is normalised together
//
//   over_last:      x [T][width]: each line is normalised, one scale and shift for each column  (layer norm)
//   over_channels:  x [channels][places]: groups of channels are normalised, one for each channel  (group norm)
//
// The normalised input is not kept from forward: mean and deviation are taken again while x is in cache. float32.
#pragma once
#include <cstdint>

namespace dpk {

struct NormRowKernels {
  // w may be null, for ones; so may dx.
  void (*over_last)(const float* x, const float* g, const float* w, int64_t count, int64_t width, float epsilon,
                    float* dx, float* scale, float* shift);
  void (*over_channels)(const float* x, const float* g, const float* w, int64_t channels, int64_t places, float epsilon,
                        float* dx, float* scale, float* shift);  // one group
};

const NormRowKernels& norm_row_kernels();

}  // namespace dpk
