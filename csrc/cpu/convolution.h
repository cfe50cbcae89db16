// The sizes of a convolution of one to three dimensions, as one of three: missing ones come first, of size one.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "arguments.h"

namespace dpk {

using Three = std::array<int64_t, 3>;

inline Three three(const std::vector<int64_t>& values, int64_t missing) {
  Three result{missing, missing, missing};
  std::copy(values.begin(), values.end(), result.end() - static_cast<std::ptrdiff_t>(values.size()));
  return result;
}

inline Three places_of(const Tensor& t, int64_t first) {
  std::vector<int64_t> sizes;
  for (int64_t d = first; d < t.dim(); ++d) sizes.push_back(t.size(d));
  return three(sizes, 1);
}

inline int64_t product_of(const Three& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

struct Convolution {
  int64_t batch, groups, inputs, outputs;            // inputs and outputs: channels of a group
  Three in, out, kernel, stride, padding, dilation;  // padding: before the first element
  // How far the outputs look, from the first padded element on.
  Three reach() const {
    Three result{};
    for (size_t d = 0; d < 3; ++d) result[d] = (out[d] - 1) * stride[d] + (kernel[d] - 1) * dilation[d] + 1;
    return result;
  }
};

}  // namespace dpk
