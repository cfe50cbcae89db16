// Each sample's gradient of the scale and shift of a normalisation, in one pass over input and output gradient:
//
//   scale_b[j] = sum over places of g * normalised(x),   shift_b[j] = sum over places of g
//
//   over_last:      x [T][width]: each line is normalised, one scale and shift for each column  (layer norm)
//   over_channels:  x [channels][places]: groups of channels are normalised, one for each channel  (group norm)
//
// The normalised input is not kept from forward: mean and deviation are taken again while x is in cache. float32.
#pragma once
#include <cstdint>

namespace dpk {

struct NormRowKernels {
  void (*over_last)(const float* x, const float* g, int64_t count, int64_t width, float epsilon, float* scale,
                    float* shift);
  void (*over_channels)(const float* x, const float* g, int64_t channels, int64_t places, float epsilon, float* scale,
                        float* shift);  // one group
};

const NormRowKernels& norm_row_kernels();

}  // namespace dpk
