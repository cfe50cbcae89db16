// torch's CPU tensors from the pool: the one file that goes by torch's C++ interface, which is another in each release.
#undef TORCH_TARGET_VERSION
#include "torch_memory.h"

#include <c10/core/CPUAllocator.h>
#include <torch/headeronly/version.h>

#include <cstring>
#include <string_view>

#include "pool.h"

namespace dpk {
namespace {

constexpr size_t large = size_t{32} << 10;

// Also for what torch took, raw, before this served it.
void release(void* block) {
  if (block == nullptr) return;
  if (!is_pooled(block)) return c10::GetDefaultCPUAllocator()->raw_deallocate(block);
  c10::profiledCPUMemoryReporter().Delete(block);
  put_block(block);
}

struct FromPool final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < large ? nullptr : take_block(bytes);
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

bool serve_torch(const char* version) {
  const std::string_view running = version;
  if (running.substr(0, running.find('+')) != TORCH_VERSION) return false;
  static FromPool* const from_pool = new FromPool;
  if (c10::GetCPUAllocator() == from_pool) return true;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return false;  // somebody else serves it
  c10::SetCPUAllocator(from_pool);
  return c10::GetCPUAllocator() == from_pool;
}

}  // namespace dpk
