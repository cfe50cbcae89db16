// What a kernel is written in: CUDA under nvcc, the emulation of it for tests elsewhere. Torch-free.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define DPK_KERNEL __global__ void
#define DPK_KERNEL_OF(threads, blocks) __global__ void __launch_bounds__(threads, blocks)  // blocks at once
#define DPK_DEVICE __device__ __forceinline__
#define DPK_SHARED __shared__
#define DPK_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char dpk_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(dpk_dynamic_shared)
#define DPK_LAUNCH(kernel, grid, threads, shared, stream, ...) kernel<<<grid, threads, shared, stream>>>(__VA_ARGS__)
#define DPK_UNROLL_4 _Pragma("unroll 4")
#define DPK_UNROLL_1 _Pragma("unroll 1")
#else
#include "emulation/emulation.h"
#define DPK_KERNEL inline void
#define DPK_KERNEL_OF(threads, blocks) inline void
#define DPK_DEVICE inline
#define DPK_SHARED static
#define DPK_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(dpk::emulation::block.shared.data())
#define DPK_LAUNCH(kernel, grid, threads, shared, stream, ...) \
  ((void)(stream), dpk::emulation::launch(grid, threads, shared, [&] { kernel(__VA_ARGS__); }))
#define DPK_UNROLL_4
#define DPK_UNROLL_1
#endif

namespace dpk::cuda {

constexpr int warp_size = 32;
constexpr unsigned all_lanes = 0xFFFFFFFFu;

// The sum over a warp in lane 0, added in a fixed order.
template <class T>
DPK_DEVICE T warp_sum(T x) {
  for (unsigned step = warp_size / 2; step > 0; step /= 2) x += __shfl_down_sync(all_lanes, x, step);
  return x;
}

// The sum over a block of whole warps, at most 1024 threads, in thread 0; `partial` has room for 32.
template <class T>
DPK_DEVICE T block_sum(T x, T* partial) {
  const unsigned lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size, warps = blockDim.x / warp_size;
  x = warp_sum(x);
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = threadIdx.x < warps ? partial[lane] : T(0);
  return warp == 0 ? warp_sum(x) : T(0);
}

// The entry of a table that has an element: entries begin at their `first`, in order, and leave no gap.
template <class Entry>
DPK_DEVICE int entry_of(const Entry* table, int count, int64_t element) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table[middle].first <= element ? low : high) = middle;
  }
  return low;
}

}  // namespace dpk::cuda
