#include "pool.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace dpk {
namespace {

constexpr size_t line = 64;
constexpr size_t gap = 3 * line;                  // blocks of round sizes would all lie in the same places of a cache
constexpr size_t small_pages = size_t{32} << 20;  // from here on in huge ones, of which a part may be idle

size_t down(size_t n, size_t to) { return n / to * to; }
size_t up(size_t n, size_t to) { return down(n + to - 1, to); }

// Whether addresses that are not backed count against a limit: the user's, or that of a system that promises no more
// than it has. Then there is no pool.
bool addresses_are_counted() {
#if defined(__linux__)
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return true;
  }
  char mode = '0';
  if (std::FILE* file = std::fopen("/proc/sys/vm/overcommit_memory", "r")) {
    mode = static_cast<char>(std::fgetc(file));
    std::fclose(file);
  }
  return mode == '2';
#else
  return true;
#endif
}

// Blocks in a range of addresses as large as the machine's memory, which the system backs as it is used.
class Pool {
 public:
  std::mutex mutex;

  Pool() {
#if defined(__linux__)
    const auto pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || bytes <= 0 || addresses_are_counted()) return;
    page_ = static_cast<size_t>(bytes);
    const size_t size = down(static_cast<size_t>(pages) * page_, size_t{2} << 20);
    if (size <= small_pages) return;
    void* range = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return;
    base_ = static_cast<char*>(range);
    size_ = size;
#if defined(MADV_HUGEPAGE)
    madvise(base_ + small_pages, size - small_pages, MADV_HUGEPAGE);
#endif
    add(0, {size, 0});
#endif
  }

  bool owns(const void* block) const {
    const char* at = static_cast<const char*>(block);
    return size_ > 0 && at >= base_ && at < base_ + size_;
  }

  size_t kept() const { return kept_; }

  void* take(size_t bytes) {
    if (bytes > size_) return nullptr;
    const size_t need = up(bytes + gap, line);
    const auto found = by_size_.lower_bound({need, 0});  // the smallest that fits, and of those the first
    if (found == by_size_.end()) return nullptr;
    const size_t at = found->second;
    const Free old = remove(free_.find(at));
    if (old.size > need) add(at + need, {old.size - need, old.kept - std::min(old.kept, need)});
    used_.emplace(at, need);
    return base_ + at;
  }

  void put(void* block) {
    const auto found = used_.find(static_cast<size_t>(static_cast<char*>(block) - base_));
    size_t at = found->first;
    Free range{found->second, found->second};
    used_.erase(found);
    const auto next = free_.lower_bound(at);
    const auto before = next == free_.begin() ? free_.end() : std::prev(next);
    if (next != free_.end() && next->first == at + range.size) range = joined(range, remove(next));
    if (before != free_.end() && before->first + before->second.size == at) {
      at = before->first;
      range = joined(range, remove(before));
    }
    add(at, range);
  }

  void empty() {
#if defined(__linux__)
    for (auto& [at, range] : free_) {
      const size_t first = up(at, page_), last = down(at + range.size, page_);
      if (range.kept > 0 && first < last) madvise(base_ + first, last - first, MADV_DONTNEED);
      range.kept = 0;
    }
#endif
    kept_ = 0;
  }

 private:
  struct Free {
    size_t size, kept;  // bytes, and about how many of them the system has backed
  };

  static Free joined(const Free& a, const Free& b) { return {a.size + b.size, a.kept + b.kept}; }

  Free remove(std::map<size_t, Free>::iterator range) {
    const Free old = range->second;
    by_size_.erase({old.size, range->first});
    kept_ -= old.kept;
    free_.erase(range);
    return old;
  }

  void add(size_t at, const Free& range) {
    free_.emplace(at, range);
    by_size_.emplace(range.size, at);
    kept_ += range.kept;
  }

  char* base_ = nullptr;
  size_t page_ = 4096, size_ = 0, kept_ = 0;
  std::map<size_t, Free> free_;                  // by offset
  std::set<std::pair<size_t, size_t>> by_size_;  // size, offset
  std::map<size_t, size_t> used_;                // size by offset
};

std::atomic<Pool*> made{nullptr};  // never destroyed: tensors may outlive the module's statics

Pool& pool() {
  static Pool* const shared = [] {
    made.store(new Pool);
#if defined(__linux__)
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
#endif
    return made.load();
  }();
  return *shared;
}

using Locked = std::lock_guard<std::mutex>;

}  // namespace

void* take_block(size_t bytes) {
  const Locked lock(pool().mutex);
  return pool().take(bytes);
}

bool is_pooled(const void* block) { return made.load() != nullptr && pool().owns(block); }

void put_block(void* block) {
  const Locked lock(pool().mutex);
  pool().put(block);
}

int64_t pool_bytes() {
  if (made.load() == nullptr) return 0;
  const Locked lock(pool().mutex);
  return static_cast<int64_t>(pool().kept());
}

void empty_pool() {
  if (made.load() == nullptr) return;
  const Locked lock(pool().mutex);
  pool().empty();
}

}  // namespace dpk
