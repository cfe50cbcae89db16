// gather_runs_: out[n][k] = sources[n][indices of run n, k], zeros behind the last of them; any type.
//
// out [N, longest run, ...], sources N tensors [records, ...], indices of all runs behind one another, counts [N].
// Limit: one read of the records, which lie anywhere, and one write.
#include <algorithm>
#include <cstring>

#include "arguments.h"
#include "parallel.h"

namespace dpk {
namespace {

constexpr int64_t records_ahead = 3;  // are fetched while one is copied: they lie anywhere

void fetch(const char* record, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(record + at);
}

}  // namespace

void gather_runs_(Tensor out, const Tensors& sources, const Tensor& indices, const Tensor& counts) {
  const auto runs = static_cast<int64_t>(sources.size()), longest = out.size(1);
  const std::vector<int64_t> first = ends_of(counts);
  const auto* count = counts.const_data_ptr<int64_t>();
  const auto* index = indices.const_data_ptr<int64_t>();
  const int64_t record = out.numel() ? out.numel() / (runs * longest) * static_cast<int64_t>(out.element_size()) : 0;
  STD_TORCH_CHECK(out.is_contiguous() && indices.is_contiguous() && out.size(0) == runs && counts.numel() == runs &&
                      first.back() == indices.numel(),
                  "gather_runs_: sizes do not fit together");
  for (int64_t n = 0; n < runs; ++n) {
    const Tensor& source = sources[static_cast<size_t>(n)];
    STD_TORCH_CHECK(source.is_contiguous() && source.scalar_type() == out.scalar_type() && count[n] <= longest &&
                        source.numel() * static_cast<int64_t>(source.element_size()) == source.size(0) * record,
                    "gather_runs_: a source has another form");
    const auto* at = index + first[static_cast<size_t>(n)];
    STD_TORCH_CHECK(std::all_of(at, at + count[n], [&](int64_t i) { return i >= 0 && i < source.size(0); }),
                    "gather_runs_: an index is beyond the records of its source");
  }
  if (record == 0) return;
  auto* data = static_cast<char*>(out.mutable_data_ptr());
  parallel_for(0, runs, (int64_t{1} << 15) / (longest * record) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const auto* source = static_cast<const char*>(sources[static_cast<size_t>(n)].const_data_ptr());
      const auto* at = index + first[static_cast<size_t>(n)];
      char* to = data + n * longest * record;
      for (int64_t k = 0; k < count[n]; ++k, to += record) {
        if (k + records_ahead < count[n]) fetch(source + at[k + records_ahead] * record, record);
        std::memcpy(to, source + at[k] * record, static_cast<size_t>(record));
      }
      std::memset(to, 0, static_cast<size_t>((longest - count[n]) * record));
    }
  });
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("gather_runs_", TORCH_BOX(&dpk::gather_runs_)); }
