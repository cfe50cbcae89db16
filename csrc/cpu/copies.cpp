// copies and unfilled: memory of the pool for samples' own weights, and for factors that outlive a step.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "pooled_floats.h"

namespace dpk {

// Memory of the pool, not filled.
Tensor unfilled(const Tensor&, std::vector<int64_t> sizes) { return pooled_floats(sizes); }

// A copy for each sample, in memory of the pool.
Tensor copies(const Tensor& shared_given, int64_t batch) {
  const Tensor shared = torch::stable::contiguous(shared_given);
  std::vector<int64_t> sizes{batch};
  for (int64_t d = 0; d < shared.dim(); ++d) sizes.push_back(shared.size(d));
  Tensor all = pooled_floats(sizes);
  const auto* from = shared.const_data_ptr<float>();
  auto* to = all.mutable_data_ptr<float>();
  const int64_t count = shared.numel();
  parallel_for(0, batch, (int64_t{1} << 15) / (count + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) std::copy_n(from, count, to + b * count);
  });
  return all;
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("copies", TORCH_BOX(&dpk::copies));
  m.impl("unfilled", TORCH_BOX(&dpk::unfilled));
}
