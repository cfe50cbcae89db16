// The little of CUDA's runtime that launchers call, with the memory of the CPU as that of the device: so that
// launchers.cu itself runs in tests, as a module for tensors of the CPU.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>

#include "emulation.h"

enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };

inline const char* cudaGetErrorString(cudaError_t) { return "nothing"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) { return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

extern "C" inline AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

namespace dpk::cuda {

struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

}  // namespace dpk::cuda
