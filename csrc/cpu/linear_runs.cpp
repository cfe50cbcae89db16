// linear_runs (linear_runs.h).
#include "linear_runs.h"

#include "arguments.h"
#include "parallel.h"
#include "pooled_floats.h"

#define DPK_KERNEL_FILE "linear_runs_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const LinearRunKernels& linear_run_kernels() {
  static constexpr LinearRunKernels tables[] = DPK_TABLES(linear_runs);
  return tables[static_cast<int>(active_isa())];
}

namespace {

constexpr int64_t lines_at_a_time = 8;  // looked at while they are in the nearest cache

}  // namespace

// x [N, lines, width], w [N, height, width]; y [N, lines, height], and faults [N, lines]: 0 where a line is finite.
std::tuple<Tensor, Tensor> linear_runs(const Tensor& x_given, const Tensor& w_given) {
  const Tensor x = with_contiguous_lines(x_given), w = with_contiguous_lines(w_given);
  const int64_t runs = x.size(0), lines = x.size(1), width = x.size(2), height = w.size(1);
  STD_TORCH_CHECK(w.size(0) == runs && w.size(2) == width, "linear_runs: sizes do not fit together");
  Tensor y = pooled_floats({runs, lines, height}), faults = pooled_floats({runs, lines});
  const auto *x_data = x.const_data_ptr<float>(), *w_data = w.const_data_ptr<float>();
  auto *y_data = y.mutable_data_ptr<float>(), *fault_data = faults.mutable_data_ptr<float>();
  const LinearRunKernels& k = linear_run_kernels();
  const int64_t parts = parts_of(runs, divide_up(lines, lines_at_a_time));
  parallel_for(0, runs * parts, (int64_t{1} << 15) / (lines * width * (height + 1) + 1) + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t n = unit / parts, part = unit % parts, last = lines * (part + 1) / parts;
                   for (int64_t l = lines * part / parts; l < last; l += lines_at_a_time) {
                     const int64_t count = std::min(lines_at_a_time, last - l);
                     const float* from = x_data + n * x.stride(0) + l * x.stride(1);
                     for (int64_t i = 0; i < count; ++i) {
                       fault_data[n * lines + l + i] = k.fault(from + i * x.stride(1), width);
                     }
                     k.product(from, x.stride(1), count, w_data + n * w.stride(0), w.stride(1), height, width,
                               y_data + (n * lines + l) * height);
                   }
                 }
               });
  return {y, faults};
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("linear_runs", TORCH_BOX(&dpk::linear_runs)); }
