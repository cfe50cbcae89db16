#include "pooled_floats.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "pool.h"

namespace dpk {

torch::stable::Tensor pooled_floats(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  const int64_t elements = sizes.empty() ? 1 : strides[0] * sizes[0];
  const size_t bytes = std::max<size_t>(static_cast<size_t>(elements) * sizeof(float), 1);
  void* block = take_block(bytes);
  if (block == nullptr) block = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (block == nullptr) throw std::bad_alloc();
  return torch::stable::from_blob(
      block, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      torch::headeronly::ScalarType::Float, +[](void* data) { is_pooled(data) ? put_block(data) : std::free(data); });
}

}  // namespace dpk
