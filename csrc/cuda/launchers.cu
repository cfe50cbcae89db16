// The ops that are CUDA kernels, under the dispatcher's CUDA key: the module dpkernels/_cuda.so, on torch's stable ABI.
// Tables are made on the host and copied to the device in one piece; kernels run on torch's current stream; all memory
// comes from torch's allocator. Bounds, seeds and noise streams come in the memory of the CPU, as on every device.
//
// Compiled and linked wherever nvcc is; never loaded by those who wrote it, who have no GPU. Tests run it as plain C++
// on an emulation of CUDA, where the device is the CPU.
#include <tuple>

#include "../tensors.h"
#include "lookup.h"
#include "sparsify.h"
#include "sums.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#define DPK_DEVICE_KEY CUDA
// In torch's CUDA library; its header declares it only where torch itself was built for CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
namespace dpk::cuda {
using torch::stable::accelerator::DeviceGuard;
inline bool on_device(const Tensor& t) { return !t.is_cpu(); }
}  // namespace dpk::cuda
#else
#include "emulation/runtime.h"
#define DPK_DEVICE_KEY CPU
namespace dpk::cuda {
inline bool on_device(const Tensor& t) { return t.is_cpu(); }
}  // namespace dpk::cuda
#endif

namespace dpk::cuda {

using Sums = std::tuple<Tensors, Tensor>;

void check(cudaError_t code) {
  STD_TORCH_CHECK(code == cudaSuccess, "dpkernels: CUDA said ", cudaGetErrorString(code));
}

// The device of a tensor while a call runs: its stream and its memory.
class Device {
 public:
  explicit Device(const Tensor& like) : like_(like), guard_(like.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    // Replayed, a captured graph would release the same noise again, from tables that are gone.
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &status));
    STD_TORCH_CHECK(status == cudaStreamCaptureStatusNone,
                    "dpkernels: cannot be captured in a CUDA graph, whose replays would release the same noise");
  }
  cudaStream_t stream() const { return stream_; }
  int32_t index() const { return like_.get_device_index(); }

  Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) const {
    return torch::stable::new_empty(like_, sizes, type);
  }

  // Memory for so many objects, for the rest of the call.
  template <class T>
  T* room(int64_t count) {
    const int64_t words = (count * static_cast<int64_t>(sizeof(T)) + 7) / 8;
    return reinterpret_cast<T*>(
        kept_.emplace_back(empty({words > 0 ? words : 1}, ScalarType::Long)).mutable_data_ptr());
  }

  // A copy of a table. From pageable memory, so what was given may go when this returns.
  template <class T>
  const T* copy(const T* table, int64_t count) {
    T* to = room<T>(count);
    if (count > 0) {
      check(cudaMemcpyAsync(to, table, static_cast<size_t>(count) * sizeof(T), cudaMemcpyHostToDevice, stream_));
    }
    return to;
  }
  template <class T>
  const T* copy(const std::vector<T>& table) {
    return copy(table.data(), static_cast<int64_t>(table.size()));
  }

  void keep(const Tensor& t) { kept_.push_back(t); }
  void done() const { check(cudaGetLastError()); }

 private:
  Tensor like_;
  DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  Tensors kept_;
};

// Pointers go to kernels: tensors must be where the device is. Bounds, seeds and streams must not.
void check_there(const Tensor& t, const Device& device) {
  STD_TORCH_CHECK(on_device(t) && t.get_device_index() == device.index(), "dpkernels: tensors must be on one device");
}
void check_on_host(const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu(), "dpkernels: bounds, seeds, streams and stds must be on the CPU");
}
Noise checked_noise(const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  if (stream) check_on_host(*stream);
  if (std) check_on_host(*std);
  return noise_of(stream, std);
}

Source source_of(Device& device, const Tensor& now, const Tensor* before) {
  check_there(now, device);
  const Tensor a = with_contiguous_samples(now);
  device.keep(a);
  Source source{a.const_data_ptr(), nullptr, a.stride(0), 0, sample_length(a), element_of(a)};
  if (before != nullptr) {
    check_there(*before, device);
    STD_TORCH_CHECK(before->scalar_type() == now.scalar_type(), "dpkernels: both inputs must have one type");
    const Tensor b = with_contiguous_samples(*before);
    device.keep(b);
    source.before = b.const_data_ptr();
    source.before_stride = b.stride(0);
  }
  return source;
}

template <Form form>
void add_sums(Device& device, const Tables& tables, const Weights& weights, const Noise& noise, double scale) {
  const Target* targets = device.copy(tables.targets);
  const Source* sources = device.copy(tables.sources);
  const int count = static_cast<int>(tables.targets.size());
  const auto with = [&](const auto& kind) {
    launch_sums<form>(targets, count, tables.total, sources, weights, kind, scale, device.stream());
  };
  if (!noise.on) {
    with(NoNoise{});
  } else if (noise.secure) {
    with(ChaChaNoise{noise.secure_stream, noise.std, lattice_step(noise.std)});
  } else {
    with(PhiloxNoise{noise.stream, noise.std});
  }
  device.done();
}

template <Form form>
Sums sum_tensors(const Tensors& now, const Tensors& before, const RuleNumbers& numbers, const double* max_norms,
                 int groups, double limit, const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  Device device(now[0]);
  const int64_t samples = now[0].size(0);
  Tables tables;
  Tensors sums;
  bool wide_norms = false;
  for (size_t i = 0; i < now.size(); ++i) {
    const auto sizes = now[i].sizes();
    const bool wide = wide_type(now[i]) == ScalarType::Double;
    wide_norms = wide_norms || wide;
    sums.push_back(device.empty(std::vector<int64_t>(sizes.begin() + 1, sizes.end()), wide_type(now[i])));
    tables.add_target(sums.back().mutable_data_ptr(), sums.back().numel(), wide, false);
    tables.add_source(source_of(device, now[i], before.empty() ? nullptr : &before[i]));
  }
  const auto chunk_count = static_cast<int64_t>(tables.chunks.size());
  auto* partial = device.room<double>(samples * chunk_count * product_count<form>);
  launch_products<form>(device.copy(tables.sources), device.copy(tables.chunks), chunk_count, samples, partial,
                        device.stream());
  Tensor norms = device.empty({samples}, ScalarType::Double);
  auto* coefficient = device.room<double>(samples * groups * coefficient_count<form>);
  const double* bounds = max_norms == nullptr ? nullptr : device.copy(max_norms, groups);
  launch_coefficients<form>(partial, device.copy(tables.ends(groups)), groups, samples, numbers, bounds, coefficient,
                            norms.mutable_data_ptr<double>(), device.stream());
  add_sums<form>(device, tables, {coefficient, samples, groups, limit}, checked_noise(stream, std), 1.0);
  if (!wide_norms) norms = torch::stable::to(norms, ScalarType::Float);
  return {std::move(sums), norms};
}

Sums clipped_sum(const Tensors& now, const Tensors& before, const Tensor& max_norms, std::optional<double> stability,
                 const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  check_on_host(max_norms);
  const RuleNumbers numbers{stability ? Rule::automatic : Rule::flat, stability.value_or(0.0), {}};
  return sum_tensors<Form::single>(now, before, numbers, max_norms.const_data_ptr<double>(),
                                   static_cast<int>(max_norms.numel()), -1.0, stream, std);
}

Sums clip_sum(const Tensors& vectors, const Tensor& max_norms, std::optional<double> stability,
              const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  return clipped_sum(vectors, {}, max_norms, stability, stream, std);
}

Sums clip_difference_sum(const Tensors& now, const Tensors& before, const Tensor& max_norms,
                         std::optional<double> stability, const std::optional<Tensor>& stream,
                         const std::optional<Tensor>& std) {
  return clipped_sum(now, before, max_norms, stability, stream, std);
}

Sums clip_momentum_sum(const Tensors& now, const Tensors& before, const Tensor& bounds,
                       const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  check_on_host(bounds);
  const double* b = bounds.const_data_ptr<double>();
  const RuleNumbers numbers{Rule::momentum, 0.0, {b[0], b[1], b[2]}};
  return sum_tensors<Form::momentum>(now, before, numbers, nullptr, 1, -1.0, stream, std);
}

Sums clamp_sum(const Tensors& vectors, const Tensor& bound, const std::optional<Tensor>& stream,
               const std::optional<Tensor>& std) {
  check_on_host(bound);
  const double limit = *bound.const_data_ptr<double>();
  return sum_tensors<Form::single>(vectors, {}, {Rule::clamp, 0.0, {}}, nullptr, 1, limit, stream, std);
}

Tensor row_squares(const Tensors& tensors) {
  Device device(tensors[0]);
  const int64_t samples = tensors[0].size(0);
  const int groups = static_cast<int>(tensors.size());
  Tables tables;
  for (const Tensor& t : tensors) tables.add_source(source_of(device, t, nullptr));
  const auto chunk_count = static_cast<int64_t>(tables.chunks.size());
  auto* partial = device.room<double>(samples * chunk_count);
  launch_products<Form::single>(device.copy(tables.sources), device.copy(tables.chunks), chunk_count, samples, partial,
                                device.stream());
  Tensor squares = device.empty({samples, groups}, ScalarType::Double);
  launch_coefficients<Form::single>(partial, device.copy(tables.ends(groups)), groups, samples,
                                    {Rule::squares, 0.0, {}}, nullptr, squares.mutable_data_ptr<double>(), nullptr,
                                    device.stream());
  device.done();
  return squares;
}

Tensor lookup_squares(const Tensor& ids_given, const Tensor& g_given) {
  Device device(g_given);
  check_there(ids_given, device);
  const Tensor ids = torch::stable::contiguous(ids_given), g = torch::stable::contiguous(g_given);
  const int64_t samples = g.size(0), length = g.size(1), blocks = lookup_blocks(length);
  auto* next = device.room<int64_t>(samples * length);
  auto* partial = device.room<double>(samples * blocks);
  launch_lookup(ids.const_data_ptr<int64_t>(), g.const_data_ptr<float>(), samples, length, g.size(2), next, partial,
                device.stream());
  Tensor squares = device.empty({samples}, ScalarType::Double);
  launch_coefficients<Form::single>(partial, device.copy(&blocks, 1), 1, samples, {Rule::squares, 0.0, {}}, nullptr,
                                    squares.mutable_data_ptr<double>(), nullptr, device.stream());
  device.done();
  return squares;
}

void weighted_sum_(Tensors sums, std::vector<bool> filled, const Tensors& rows, std::vector<int64_t> owner,
                   const Tensor& weights, const std::optional<Tensor>& stream, const std::optional<Tensor>& std,
                   double scale) {
  if (sums.empty()) return;
  Device device(sums[0]);
  Tables tables;
  for (size_t i = 0; i < sums.size(); ++i) {
    check_there(sums[i], device);
    STD_TORCH_CHECK(sums[i].is_contiguous(), "dpkernels: sums must be contiguous");
    STD_TORCH_CHECK(sums[i].scalar_type() == wide_type(sums[i]), "dpkernels: sums must be float32 or float64");
    tables.add_target(sums[i].mutable_data_ptr(), sums[i].numel(), wide_type(sums[i]) == ScalarType::Double, filled[i]);
    for (size_t j = 0; j < rows.size(); ++j) {
      if (owner[j] == static_cast<int64_t>(i)) tables.add_source(source_of(device, rows[j], nullptr));
    }
  }
  check_there(weights, device);
  const Tensor own = torch::stable::contiguous(weights);
  const int64_t samples = rows.empty() ? 0 : own.size(0);
  add_sums<Form::single>(device, tables, {own.const_data_ptr<double>(), samples, static_cast<int>(own.size(1)), -1.0},
                         checked_noise(stream, std), scale);
}

void add_gaussian_(Tensors tensors, const Tensor& stream, const Tensor& std) {
  if (tensors.empty()) return;
  Device device(tensors[0]);
  Tables tables;
  Tensors work;  // what the noise is added to: the tensor itself, or a wide contiguous copy
  for (const Tensor& t : tensors) {
    check_there(t, device);
    const bool in_place = t.is_contiguous() && t.scalar_type() == wide_type(t);
    work.push_back(in_place ? t : torch::stable::to(torch::stable::contiguous(t), wide_type(t)));
    tables.add_target(work.back().mutable_data_ptr(), t.numel(), wide_type(t) == ScalarType::Double, true);
  }
  add_sums<Form::single>(device, tables, {nullptr, 0, 1, -1.0}, checked_noise(stream, std), 1.0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (work[i].get() != tensors[i].get()) torch::stable::copy_(tensors[i], work[i]);
  }
}

// The number of kept coordinates is read back: the one place where the CPU waits for the device.
std::tuple<Tensor, Tensor> sparsify(const Tensor& vector, double keep_probability, const Tensor& seed,
                                    const std::optional<Tensor>& stream, const std::optional<Tensor>& std) {
  const Tensor x = torch::stable::to(torch::stable::contiguous(vector), wide_type(vector));
  Device device(x);
  const int64_t size = x.numel();
  check_on_host(seed);
  const MaskRule rule = mask_rule(*seed.const_data_ptr<int64_t>(), keep_probability);
  auto* counts = device.room<int64_t>(mask_blocks(size) + 1);
  launch_count(rule, size, counts, device.stream());
  int64_t kept = 0;
  check(cudaMemcpyAsync(&kept, counts + mask_blocks(size), sizeof(kept), cudaMemcpyDeviceToHost, device.stream()));
  check(cudaStreamSynchronize(device.stream()));
  const bool wide = x.scalar_type() == ScalarType::Double;
  Tensor indices = device.empty({kept}, ScalarType::Long), values = device.empty({kept}, x.scalar_type());
  if (wide) {
    launch_gather(x.const_data_ptr<double>(), rule, size, counts, indices.mutable_data_ptr<int64_t>(),
                  values.mutable_data_ptr<double>(), device.stream());
  } else {
    launch_gather(x.const_data_ptr<float>(), rule, size, counts, indices.mutable_data_ptr<int64_t>(),
                  values.mutable_data_ptr<float>(), device.stream());
  }
  Tables tables;
  tables.add_target(values.mutable_data_ptr(), kept, wide, true);
  add_sums<Form::single>(device, tables, {nullptr, 0, 1, -1.0}, checked_noise(stream, std), 1.0 / keep_probability);
  return {values, indices};
}

}  // namespace dpk::cuda

STABLE_TORCH_LIBRARY_IMPL(dpkernels, DPK_DEVICE_KEY, m) {
  m.impl("clip_sum", TORCH_BOX(&dpk::cuda::clip_sum));
  m.impl("clip_difference_sum", TORCH_BOX(&dpk::cuda::clip_difference_sum));
  m.impl("clip_momentum_sum", TORCH_BOX(&dpk::cuda::clip_momentum_sum));
  m.impl("clamp_sum", TORCH_BOX(&dpk::cuda::clamp_sum));
  m.impl("row_squares", TORCH_BOX(&dpk::cuda::row_squares));
  m.impl("lookup_squares", TORCH_BOX(&dpk::cuda::lookup_squares));
  m.impl("weighted_sum_", TORCH_BOX(&dpk::cuda::weighted_sum_));
  m.impl("add_gaussian_", TORCH_BOX(&dpk::cuda::add_gaussian_));
  m.impl("sparsify", TORCH_BOX(&dpk::cuda::sparsify));
}
