// add_gaussian_: x += std * z for each tensor of a list, elements counted over the whole list (normals.h).
// add_gaussian_each_: the same for vectors behind one another, each with a stream and a std of its own.
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

namespace {

template <class T>
void add_each(T* x, const Tensor& counts, const Tensor& streams, const Tensor& stds) {
  const int64_t vectors = counts.numel(), words = streams.size(1);
  const auto* count = counts.const_data_ptr<int64_t>();
  const std::vector<int64_t> first = ends_of(counts);
  parallel_for(0, vectors, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      T* at = x + first[static_cast<size_t>(n)];
      NoiseAdder(noise_of(streams.const_data_ptr<int64_t>() + n * words, words, stds.const_data_ptr<double>()[n]))
          .add(at, at, count[n], 0);
    }
  });
}

}  // namespace

// Every value must be one of those counted: none stays without noise.
void add_gaussian_each_(Tensor values, const Tensor& counts, const Tensor& streams, const Tensor& stds) {
  STD_TORCH_CHECK(values.is_contiguous() && streams.is_contiguous() && stds.is_contiguous() &&
                      streams.size(0) == counts.numel() && stds.numel() == counts.numel() &&
                      ends_of(counts).back() == values.numel(),
                  "add_gaussian_each_: sizes do not fit together");
  if (values.scalar_type() == ScalarType::Double) {
    add_each(values.mutable_data_ptr<double>(), counts, streams, stds);
  } else {
    add_each(values.mutable_data_ptr<float>(), counts, streams, stds);
  }
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("add_gaussian_", TORCH_BOX(&dpk::add_gaussian_));
  m.impl("add_gaussian_each_", TORCH_BOX(&dpk::add_gaussian_each_));
}
