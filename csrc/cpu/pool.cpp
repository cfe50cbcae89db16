#include "pool.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace dpk {
namespace {

constexpr size_t page = 4096, huge_page = size_t{2} << 20;

// From the system itself: blocks that live long within malloc's heap would keep it from reusing what is around them.
void* map(size_t bytes) {
#if defined(__linux__)
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (bytes >= huge_page) madvise(block, bytes, MADV_HUGEPAGE);
#endif
  return block;
#else
  return ::operator new(bytes, std::align_val_t{page});
#endif
}

void unmap(void* block, size_t bytes) {
#if defined(__linux__)
  munmap(block, bytes);
#else
  static_cast<void>(bytes);
  ::operator delete(block, std::align_val_t{page});
#endif
}

struct Pool {
  std::mutex mutex;
  std::multimap<size_t, void*> free;  // by size
  std::map<void*, size_t> used;
  size_t free_bytes = 0;

  void* take(size_t need) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = free.lower_bound(need);
    if (found == free.end() || found->first > 2 * need + huge_page) {
      // A little more than asked for: batches drawn at random are not all of one size.
      const size_t bytes = (need + need / 16 + page - 1) / page * page;
      give_back(bytes);  // blocks that nothing has fitted
      void* block = map(bytes);
      used.emplace(block, bytes);
      return block;
    }
    void* block = found->second;
    used.emplace(block, found->first);
    free_bytes -= found->first;
    free.erase(found);
    return block;
  }

  void put(void* block) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = used.find(block);
    free.emplace(found->second, block);
    free_bytes += found->second;
    used.erase(found);
  }

  void give_back(size_t bytes) {
    while (!free.empty() && bytes > 0) {
      const auto last = std::prev(free.end());
      unmap(last->second, last->first);
      free_bytes -= last->first;
      bytes -= std::min(bytes, last->first);
      free.erase(last);
    }
  }
};

Pool& pool() {
  static Pool* const shared = new Pool;  // never destroyed: tensors may outlive the module's statics
  return *shared;
}

}  // namespace

torch::stable::Tensor pooled_floats(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  const int64_t elements = sizes.empty() ? 1 : strides[0] * sizes[0];
  void* block = pool().take(std::max<size_t>(static_cast<size_t>(elements) * sizeof(float), 64));
  return torch::stable::from_blob(
      block, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      torch::headeronly::ScalarType::Float, +[](void* data) { pool().put(data); });
}

int64_t pool_bytes() {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  return static_cast<int64_t>(pool().free_bytes);
}

void empty_pool() {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  pool().give_back(pool().free_bytes);
}

void trim() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

void keep_freed() {
#if defined(__GLIBC__)
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) return;
  }
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most it takes
  mallopt(M_TRIM_THRESHOLD, -1);
#endif
}

}  // namespace dpk
