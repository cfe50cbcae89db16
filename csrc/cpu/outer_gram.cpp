// outer_gram: squares [B] and sizes [B] of rows that stay factors (outer_gram.h).
#include "outer_gram.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "arguments.h"
#include "parallel.h"

#define DPK_KERNEL_FILE "outer_gram_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const OuterGramKernels& outer_gram_kernels() {
  static constexpr OuterGramKernels tables[] = DPK_TABLES(outer_gram);
  return tables[static_cast<int>(active_isa())];
}

namespace {

// A sample's lines in float64, with lines of zeros up to a whole block.
struct Lines {
  std::vector<double> data;
  int64_t width = 0;

  void take(const OuterGramKernels& k, const float* from, int64_t stride, int64_t count, int64_t wide) {
    width = wide;
    const int64_t blocks = (count + gram_block - 1) / gram_block;
    data.resize(static_cast<size_t>(blocks * gram_block * width));
    for (int64_t t = 0; t < count; ++t) k.widen(from + t * stride, width, data.data() + t * width);
    std::fill(data.begin() + count * width, data.end(), 0.0);
  }
  const double* block(int64_t i) const { return data.data() + i * gram_block * width; }
};

}  // namespace

std::tuple<Tensor, Tensor> outer_gram(const Tensor& a_given, const Tensor& g_given) {
  const Tensor a = with_contiguous_lines(a_given), g = with_contiguous_lines(g_given);
  const int64_t batch = a.size(0), length = a.size(1), blocks = (length + gram_block - 1) / gram_block;
  Tensor squares = empty(&batch, 1, ScalarType::Double), sizes = empty(&batch, 1, ScalarType::Double);
  auto *square = squares.mutable_data_ptr<double>(), *size = sizes.mutable_data_ptr<double>();
  const auto *a_data = a.const_data_ptr<float>(), *g_data = g.const_data_ptr<float>();
  const OuterGramKernels& k = outer_gram_kernels();
  parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    static thread_local Lines as, gs;
    for (int64_t b = begin; b < end; ++b) {
      as.take(k, a_data + b * a.stride(0), a.stride(1), length, a.size(2));
      gs.take(k, g_data + b * g.stride(0), g.stride(1), length, g.size(2));
      square[b] = size[b] = 0.0;
      for (int64_t i = 0; i < blocks; ++i) {
        for (int64_t j = 0; j <= i; ++j) {
          double of_a[gram_block][gram_block], of_g[gram_block][gram_block], sum = 0.0;
          k.products(as.block(i), as.block(j), as.width, as.width, of_a);
          k.products(gs.block(i), gs.block(j), gs.width, gs.width, of_g);
          for (int m = 0; m < gram_block; ++m) {
            for (int n = 0; n < gram_block; ++n) sum += of_a[m][n] * of_g[m][n];
            if (i == j) size[b] += std::sqrt(of_a[m][m]) * std::sqrt(of_g[m][m]);
          }
          square[b] += i == j ? sum : 2.0 * sum;
        }
      }
    }
  });
  return {squares, sizes};
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("outer_gram", TORCH_BOX(&dpk::outer_gram)); }
