// Memory for rows that live from a backward to the end of its step. Fresh pages cost several times what it takes to
// fill them, so blocks that tensors gave back are kept for later ones, and large blocks ask for huge pages.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace dpk {

// A contiguous float32 tensor, not filled; its memory goes back to the pool with it.
torch::stable::Tensor pooled_floats(const std::vector<int64_t>& sizes);

// Bytes the pool holds for tensors that do not exist yet; and giving them back to the system.
int64_t pool_bytes();
void empty_pool();

// Memory that was freed, but that the C library keeps, back to the system, where it knows how to.
void trim();

// From now on freed memory stays with the C library, up to blocks of 32 MiB, unless the environment tells it otherwise.
void keep_freed();

}  // namespace dpk
