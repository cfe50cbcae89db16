// CUDA's execution model on one CPU thread, for tests: the same kernel source, compiled by a C++ compiler.
//
// Every thread of a block is a fiber; blocks run one after the other. Which fiber goes on is drawn at random at each
// point where threads meet, so code that relies on an order fails. Shuffles, votes and __syncwarp are meetings of the
// lanes in their mask; where nobody can go on, some thread waits at a barrier that others never reach: an error.
// Dynamic shared memory starts as NaN. AddressSanitizer knows the fibers' stacks; for ThreadSanitizer each fiber is a
// thread, ordered by nothing but the meetings, so that it names the two lines of a race.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline dim3 blockIdx, blockDim, gridDim;
typedef struct EmulatedStream* cudaStream_t;
#define threadIdx (dpk::emulation::place())
// What the emulation itself reads and writes is no matter of the kernel's threads.
#define DPK_UNSEEN __attribute__((no_sanitize_thread))

namespace dpk::emulation {

constexpr size_t stack_bytes = 256 * 1024;
constexpr unsigned warp_lanes = 32;

enum class State { ready, at_block_barrier, at_warp_meeting, done };

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[stack_bytes]};  // not filled: that would touch all of it
  State state = State::ready;
  dim3 place;
  unsigned mask = 0;                // of the meeting it waits at
  uint64_t brought = 0;             // to that meeting
  uint64_t found[warp_lanes] = {};  // what all lanes brought to the last one
  void *fake_stack = nullptr, *thread = nullptr;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  ucontext_t scheduler{};
  Fiber* running = nullptr;
  std::function<void()> body;
  std::vector<char> shared;
  std::mt19937 random{2026};
  const void* scheduler_stack = nullptr;
  size_t scheduler_size = 0;
  void *scheduler_fake = nullptr, *scheduler_thread = nullptr;
};
inline Block block;

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulation: block (%u, %u): %s\n", blockIdx.x, blockIdx.y, why);
  std::abort();
}

// What was written before a meeting is seen after it.
inline void tell(void* at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(at);
#endif
  (void)at;
}
inline void hear(void* at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(at);
#endif
  (void)at;
}

DPK_UNSEEN inline void to_scheduler(bool finished = false) {
  Fiber& me = *block.running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(finished ? nullptr : &me.fake_stack, block.scheduler_stack, block.scheduler_size);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(block.scheduler_thread, 1);  // 1: no order follows from it
#endif
  (void)finished;
  swapcontext(&me.context, &block.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me.fake_stack, &block.scheduler_stack, &block.scheduler_size);
#endif
}

DPK_UNSEEN inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_size);
#endif
  hear(&block.body);
  block.body();
  tell(&block.fibers);
  block.running->state = State::done;
  to_scheduler(true);
}

DPK_UNSEEN inline void go_on(Fiber& fiber) {
  block.running = &fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&block.scheduler_fake, fiber.stack.get(), stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.thread, 1);
#endif
  swapcontext(&block.scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(block.scheduler_fake, nullptr, nullptr);
#endif
}

DPK_UNSEEN inline dim3 place() { return block.running->place; }

DPK_UNSEEN inline unsigned index_of(const dim3& at) { return (at.z * blockDim.y + at.y) * blockDim.x + at.x; }

DPK_UNSEEN inline void wait(State state, void* at) {
  Fiber& me = *block.running;
  tell(at);
  me.state = state;
  to_scheduler();
  hear(at);
}

// Lets those go on that wait for nobody any more.
DPK_UNSEEN inline bool release_some() {
  bool all = true, any = false;
  for (auto& fiber : block.fibers)
    all = all && (fiber->state == State::at_block_barrier || fiber->state == State::done);
  for (auto& fiber : block.fibers) {
    if (all && fiber->state == State::at_block_barrier) fiber->state = State::ready, any = true;
  }
  for (size_t first = 0; first < block.fibers.size(); first += warp_lanes) {
    const size_t lanes = std::min<size_t>(warp_lanes, block.fibers.size() - first);
    for (size_t l = 0; l < lanes; ++l) {
      const Fiber& one = *block.fibers[first + l];
      if (one.state != State::at_warp_meeting) continue;
      bool complete = true;
      for (size_t m = 0; m < warp_lanes; ++m) {
        if (!(one.mask >> m & 1u)) continue;
        if (m >= lanes) fail("a mask names lanes that the block does not have");
        const Fiber& other = *block.fibers[first + m];
        if (other.state == State::done) fail("a mask names a lane that has ended");
        complete = complete && other.state == State::at_warp_meeting && other.mask == one.mask;
      }
      if (!complete) continue;
      uint64_t all_brought[warp_lanes] = {};
      const unsigned mask = one.mask;
      for (size_t m = 0; m < lanes; ++m) all_brought[m] = block.fibers[first + m]->brought;
      for (size_t m = 0; m < lanes; ++m) {
        if (!(mask >> m & 1u)) continue;
        std::memcpy(block.fibers[first + m]->found, all_brought, sizeof(all_brought));
        block.fibers[first + m]->state = State::ready, any = true;
      }
    }
  }
  return any;
}

DPK_UNSEEN inline void run_block(const std::function<void()>& body, size_t shared_bytes) {
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  block.body = body;
  block.shared.assign(shared_bytes, static_cast<char>(0xFF));  // NaN, whatever is read there
  block.fibers.clear();
#if defined(__SANITIZE_THREAD__)
  block.scheduler_thread = __tsan_get_current_fiber();
#endif
  for (unsigned t = 0; t < threads; ++t) {
    auto fiber = std::make_unique<Fiber>();
    fiber->place = dim3(t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y));
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = stack_bytes;
    makecontext(&fiber->context, fiber_main, 0);
#if defined(__SANITIZE_THREAD__)
    fiber->thread = __tsan_create_fiber(0);
#endif
    block.fibers.push_back(std::move(fiber));
  }
  tell(&block.body);
  for (;;) {
    std::vector<Fiber*> ready;
    bool done = true;
    for (auto& fiber : block.fibers) {
      if (fiber->state == State::ready) ready.push_back(fiber.get());
      done = done && fiber->state == State::done;
    }
    if (done) break;
    if (ready.empty()) {
      if (!release_some()) fail("threads wait at a barrier that others never reach");
      continue;
    }
    go_on(*ready[block.random() % ready.size()]);
  }
  hear(&block.fibers);
#if defined(__SANITIZE_THREAD__)
  for (auto& fiber : block.fibers) __tsan_destroy_fiber(fiber->thread);
#endif
}

template <class Body>
void launch(dim3 grid, dim3 threads, size_t shared_bytes, const Body& body) {
  gridDim = grid, blockDim = threads;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        run_block(body, shared_bytes);
      }
    }
  }
}

// What all lanes of `mask` brought.
DPK_UNSEEN inline const uint64_t* meet(unsigned mask, uint64_t value) {
  Fiber& me = *block.running;
  me.mask = mask, me.brought = value;
  if (!(mask >> (index_of(me.place) % warp_lanes) & 1u)) fail("a lane is not in the mask it gives");
  wait(State::at_warp_meeting, block.fibers[index_of(me.place) / warp_lanes * warp_lanes].get());
  return me.found;
}

template <class T>
DPK_UNSEEN uint64_t packed(T value) {
  uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof(bits));
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
DPK_UNSEEN T unpacked(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

DPK_UNSEEN inline unsigned lane() { return index_of(block.running->place) % warp_lanes; }

}  // namespace dpk::emulation

DPK_UNSEEN inline void __syncthreads() {
  dpk::emulation::wait(dpk::emulation::State::at_block_barrier, &dpk::emulation::block);
}
DPK_UNSEEN inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { dpk::emulation::meet(mask, 0); }

template <class T>
DPK_UNSEEN T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const uint64_t* all = dpk::emulation::meet(mask, dpk::emulation::packed(value));
  const unsigned from = dpk::emulation::lane() + delta;
  return from < dpk::emulation::warp_lanes ? dpk::emulation::unpacked<T>(all[from]) : value;
}

template <class T>
DPK_UNSEEN T __shfl_sync(unsigned mask, T value, unsigned from) {
  return dpk::emulation::unpacked<T>(dpk::emulation::meet(mask, dpk::emulation::packed(value))[from % 32]);
}

DPK_UNSEEN inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const uint64_t* all = dpk::emulation::meet(mask, vote);
  unsigned votes = 0;
  for (unsigned l = 0; l < 32; ++l) votes |= (mask >> l & 1u) ? static_cast<unsigned>(all[l]) << l : 0u;
  return votes;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
