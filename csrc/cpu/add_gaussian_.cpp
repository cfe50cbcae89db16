// add_gaussian_: x += std * z for each tensor of a list, elements counted over the whole list (normals.h).
#include <algorithm>

#include "arguments.h"
#include "parallel.h"

namespace dpk {

void add_gaussian_(Tensors tensors, const Tensor& stream, const Tensor& std) {
  struct Piece {
    char* data;
    Element element;
    int64_t length, first;
  };
  std::vector<Piece> pieces;
  Tensors work;  // what the noise is added to: the tensor itself, or a wide contiguous copy
  int64_t first = 0;
  for (const Tensor& t : tensors) {
    const bool in_place = t.is_contiguous() && t.scalar_type() == wide_type(t);
    work.push_back(in_place ? t : torch::stable::to(torch::stable::contiguous(t), wide_type(t)));
    const Element element = element_of(work.back());
    const int64_t size = t.numel();
    char* data = static_cast<char*>(work.back().mutable_data_ptr());
    for (int64_t start = 0; start < size; start += tile_elements) {
      pieces.push_back(
          {data + start * element_bytes(element), element, std::min(tile_elements, size - start), first + start});
    }
    first += size;
  }
  const Noise noise = noise_of(stream, std);
  parallel_for(0, static_cast<int64_t>(pieces.size()), 8, [&](int64_t begin, int64_t end) {
    NoiseAdder adder(noise);
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      if (piece.element == Element::f64) {
        auto* x = reinterpret_cast<double*>(piece.data);
        adder.add(x, x, piece.length, piece.first);
      } else {
        auto* x = reinterpret_cast<float*>(piece.data);
        adder.add(x, x, piece.length, piece.first);
      }
    }
  });
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (work[i].get() != tensors[i].get()) torch::stable::copy_(tensors[i], work[i]);
  }
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("add_gaussian_", TORCH_BOX(&dpk::add_gaussian_)); }
