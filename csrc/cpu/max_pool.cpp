// max_pool and max_pool_input: the largest of each window, and its backward (max_pool.h).
#include "max_pool.h"

#include <algorithm>

#include "arguments.h"
#include "parallel.h"
#include "scratch.h"

#define DPK_KERNEL_FILE "max_pool_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const MaxPoolKernels& max_pool_kernels() {
  static constexpr MaxPoolKernels tables[] = DPK_TABLES(max_pool);
  return tables[static_cast<int>(active_isa())];
}

namespace {

constexpr int64_t most_lanes = 16;
using Sizes = std::vector<int64_t>;

int64_t grain(int64_t elements) { return (int64_t{1} << 13) / std::max<int64_t>(elements, 1) + 1; }

}  // namespace

std::tuple<Tensor, Tensor> max_pool(const Tensor& x_given, Sizes kernel, Sizes stride, Sizes padding, Sizes size) {
  const Tensor x = torch::stable::contiguous(x_given);
  const int64_t shape[] = {x.size(0), x.size(1), size[0], size[1]};
  Tensor y = empty(shape, 4, ScalarType::Float);
  Tensor where = torch::stable::new_empty(x, {shape[0], shape[1], shape[2], shape[3]}, ScalarType::Byte);
  const int64_t pitch = size[1] + (kernel[1] - 1) / stride[1] + most_lanes;
  const auto offsets = [&](int64_t line) {
    Sizes found;
    for (int64_t k = 0; k < kernel[0] * kernel[1]; ++k) {
      const int64_t row = k / kernel[1], column = k % kernel[1];
      found.push_back((row * stride[1] + column % stride[1]) * line + column / stride[1]);
    }
    return found;
  };
  const Sizes offset = offsets(pitch), offset_in_place = offsets(x.size(3));
  std::vector<int32_t> first(static_cast<size_t>(size[1] + most_lanes), 0);
  for (int64_t j = 0; j < size[1]; ++j) {
    first[static_cast<size_t>(j)] = static_cast<int32_t>(std::max<int64_t>(padding[1] - j * stride[1], 0));
  }
  const int64_t rows = (size[0] - 1) * stride[0] + kernel[0];
  const Pooling pooling{x.size(2),
                        x.size(3),
                        size[0],
                        size[1],
                        {kernel[0], kernel[1]},
                        {stride[0], stride[1]},
                        {padding[0], padding[1]},
                        rows,
                        pitch,
                        offset.data(),
                        first.data()};
  const auto* from = x.const_data_ptr<float>();
  auto* to = y.mutable_data_ptr<float>();
  auto* codes = where.mutable_data_ptr<uint8_t>();
  const int64_t planes = x.size(0) * x.size(1), in = x.size(2) * x.size(3), out = size[0] * size[1];
  const auto run = max_pool_kernels().plane;
  // Windows within the image, next to one another, are read in place, but for where whole vectors reach beyond the end.
  const bool within =
      stride[1] == 1 && padding[0] == 0 && padding[1] == 0 && rows <= x.size(2) && size[1] + kernel[1] - 1 <= x.size(3);
  const int64_t in_place = within ? planes - divide_up(most_lanes + kernel[1], in) : 0;
  Pooling pooling_in_place = pooling;
  pooling_in_place.pitch = x.size(3);
  pooling_in_place.offset = offset_in_place.data();
  parallel_for(0, planes, grain(in), [&](int64_t begin, int64_t end) {
    float* bordered = scratch(0, rows * stride[1] * pitch);
    for (int64_t i = begin; i < end; ++i) {
      const bool direct = i < in_place;
      run(direct ? pooling_in_place : pooling, from + i * in, direct ? nullptr : bordered, to + i * out,
          codes + i * out);
    }
  });
  return {y, where};
}

Tensor max_pool_input(const Tensor& g_given, const Tensor& where, Sizes kernel, Sizes stride, Sizes padding,
                      Sizes size) {
  const Tensor g = torch::stable::contiguous(g_given);
  const int64_t shape[] = {g.size(0), g.size(1), size[0], size[1]};
  Tensor dx = empty(shape, 4, ScalarType::Float);
  Sizes offset;
  for (int64_t k = 0; k < kernel[0] * kernel[1]; ++k) offset.push_back(k / kernel[1] * size[1] + k % kernel[1]);
  const auto* from = g.const_data_ptr<float>();
  const auto* codes = where.const_data_ptr<uint8_t>();
  auto* to = dx.mutable_data_ptr<float>();
  const int64_t height = g.size(2), width = g.size(3), in = size[0] * size[1];
  parallel_for(0, g.size(0) * g.size(1), grain(in), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* plane = to + i * in;
      std::fill_n(plane, in, 0.0f);
      const float* gradient = from + i * height * width;
      const uint8_t* code = codes + i * height * width;
      for (int64_t row = 0; row < height; ++row, gradient += width, code += width) {
        float* corner = plane + (row * stride[0] - padding[0]) * size[1] - padding[1];
        for (int64_t j = 0; j < width; ++j, corner += stride[1]) corner[offset[code[j]]] += gradient[j];
      }
    }
  });
  return dx;
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("max_pool", TORCH_BOX(&dpk::max_pool));
  m.impl("max_pool_input", TORCH_BOX(&dpk::max_pool_input));
}
