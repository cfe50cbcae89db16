// Rows and what is made of them, in memory of the pool (see pool.h).
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace dpk {

// A contiguous float32 tensor, not filled; its memory goes back to the pool with it.
torch::stable::Tensor pooled_floats(const std::vector<int64_t>& sizes);

}  // namespace dpk
