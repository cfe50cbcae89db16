// Tensors and noise as the dispatcher hands them over, on torch's stable ABI; shared by the CPU and the CUDA module.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/element.h"
#include "common/noise.h"

namespace dpk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

inline Element element_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Element::f32;
    case ScalarType::Double:
      return Element::f64;
    case ScalarType::BFloat16:
      return Element::bf16;
    case ScalarType::Half:
      return Element::f16;
    default:
      STD_TORCH_CHECK(false, "dpkernels: tensors must be float32, float64, bfloat16 or float16");
  }
}

// Sums and messages are float64 for float64 input and float32 for the rest.
inline ScalarType wide_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The tensor itself where the elements of each sample are next to one another, else a copy.
inline Tensor with_contiguous_samples(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t expected = 1;
  for (size_t d = sizes.size() - 1; d > 0; --d) {
    if (sizes[d] != 1 && strides[d] != expected) return torch::stable::contiguous(t);
    expected *= sizes[d];
  }
  return t;
}

// Elements of one sample.
inline int64_t sample_length(const Tensor& t) {
  int64_t length = 1;
  for (int64_t d = 1; d < t.dim(); ++d) length *= t.size(d);
  return length;
}

// The noise of a stream (key, release), or of a secure one: four words of key, and the release. Both in the memory of
// the CPU.
inline Noise noise_of(const int64_t* stream, int64_t words, double std) {
  Noise noise;
  noise.on = true;
  noise.std = std;
  noise.secure = words == 5;
  if (noise.secure) {
    noise.secure_stream = secure_stream(stream, stream[4]);
  } else {
    noise.stream = {static_cast<uint64_t>(stream[0]), static_cast<uint64_t>(stream[1])};
  }
  return noise;
}

inline Noise noise_of(const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  if (!stream || !std) return {};
  return noise_of(stream->const_data_ptr<int64_t>(), stream->numel(), *std->const_data_ptr<double>());
}

}  // namespace dpk
