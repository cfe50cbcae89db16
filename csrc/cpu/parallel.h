// torch's thread pool, behind the stable ABI.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace dpk {

using torch::stable::parallel_for;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Into how many parts to cut each of so many units of work, each of so many pieces, for threads to share.
inline int64_t parts_of(int64_t units, int64_t pieces) {
  constexpr int64_t wanted = 4;
  return std::min(std::max<int64_t>(pieces, 1), divide_up(wanted, std::max<int64_t>(units, 1)));
}

}  // namespace dpk
