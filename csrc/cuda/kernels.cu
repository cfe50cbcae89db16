// All kernels in one object: what nvcc compiles for each GPU. No launcher of torch's is here yet.
#include "noise.h"
#include "sparsify.h"
#include "sums.h"

namespace dpk::cuda {

template __global__ void gather_kept<float>(const float*, Stream, uint32_t, bool, int64_t, const int64_t*, int64_t*,
                                            float*);
template __global__ void gather_kept<double>(const double*, Stream, uint32_t, bool, int64_t, const int64_t*, int64_t*,
                                             double*);

}  // namespace dpk::cuda
