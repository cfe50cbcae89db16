// low_rank_ (low_rank.h).
#include "arguments.h"
#include "low_rank.h"
#include "parallel.h"
#include "scratch.h"

#define DPK_KERNEL_FILE "low_rank_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const LowRankKernels& low_rank_kernels() {
  static constexpr LowRankKernels tables[] = DPK_TABLES(low_rank);
  return tables[static_cast<int>(active_isa())];
}

// y [B, T, d], x [B, T, p], a [B, S, p], g [B, S, d]; y is contiguous
void low_rank_(Tensor y, const Tensor& x_given, const Tensor& a_given, const Tensor& g_given) {
  const Tensor x = with_contiguous_lines(x_given), a = with_contiguous_lines(a_given),
               g = with_contiguous_lines(g_given);
  const int64_t batch = y.size(0), length = y.size(1), height = y.size(2), width = x.size(2), rank = a.size(1);
  STD_TORCH_CHECK(x.size(0) == batch && a.size(0) == batch && g.size(0) == batch && x.size(1) == length &&
                      a.size(2) == width && g.size(1) == rank && g.size(2) == height,
                  "low_rank_: sizes do not fit together");
  auto* y_data = y.mutable_data_ptr<float>();
  const auto *x_data = x.const_data_ptr<float>(), *a_data = a.const_data_ptr<float>(),
             *g_data = g.const_data_ptr<float>();
  const LowRankKernels& k = low_rank_kernels();
  const int64_t work = (length * rank + 1) * (height + width) + 1;
  parallel_for(0, batch, (int64_t{1} << 15) / work + 1, [&](int64_t begin, int64_t end) {
    float* products = scratch(0, rank);
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t t = 0; t < length; ++t) {
        k.dots(x_data + b * x.stride(0) + t * x.stride(1), a_data + b * a.stride(0), a.stride(1), rank, width,
               products);
        k.add(y_data + (b * length + t) * height, g_data + b * g.stride(0), g.stride(1), rank, height, products);
      }
    }
  });
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("low_rank_", TORCH_BOX(&dpk::low_rank_)); }
