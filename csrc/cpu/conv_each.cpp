// conv_each and conv_each_input: convolution with each sample's own weights (conv_each.h).
#include "conv_each.h"

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "convolution.h"
#include "parallel.h"
#include "scratch.h"
#include "weight_rows.h"

#define DPK_KERNEL_FILE "conv_each_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const ConvEachKernels& conv_each_kernels() {
  static constexpr ConvEachKernels tables[] = DPK_TABLES(conv_each);
  return tables[static_cast<int>(active_isa())];
}

namespace {

int64_t flat(const Three& at, const Three& sizes) { return (at[0] * sizes[1] + at[1]) * sizes[2] + at[2]; }

template <class Visit>
void for_places(const Three& sizes, const Visit& visit) {
  for (int64_t z = 0; z < sizes[0]; ++z) {
    for (int64_t y = 0; y < sizes[1]; ++y) {
      for (int64_t x = 0; x < sizes[2]; ++x) visit(Three{z, y, x});
    }
  }
}

// Where in each dimension: place p of an image is element (p + shift) / step of plane (p + shift) % step.
struct Planes {
  Three sizes, step, shift;
  int64_t size() const { return product_of(sizes); }
  int64_t phases() const { return product_of(step); }
};

// The channels of one image, [phases][channels][*sizes], zeros where there is no place.
void pack_planes(const Planes& planes, const Three& in, const float* image, int64_t channels, float* packed) {
  std::fill_n(packed, planes.phases() * channels * planes.size(), 0.0f);
  const int64_t step = planes.step[2], shift = planes.shift[2], places = product_of(in);
  const int64_t low = std::max<int64_t>(0, -shift), high = std::min(in[2], planes.sizes[2] * step - shift);
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t z = 0; z < in[0]; ++z) {
      const int64_t pz = z + planes.shift[0];
      if (pz < 0 || pz / planes.step[0] >= planes.sizes[0]) continue;
      for (int64_t y = 0; y < in[1]; ++y) {
        const int64_t py = y + planes.shift[1];
        if (py < 0 || py / planes.step[1] >= planes.sizes[1]) continue;
        const float* from = image + c * places + (z * in[1] + y) * in[2];
        const int64_t phase = (pz % planes.step[0] * planes.step[1] + py % planes.step[1]) * step;
        const int64_t line = flat({pz / planes.step[0], py / planes.step[1], 0}, planes.sizes);
        float* to = packed + (phase * channels + c) * planes.size() + line;
        if (step == 1) {
          std::copy(from + low, from + std::max(low, high), to + low + shift);
        } else {
          for (int64_t x = low; x < high; ++x) {
            to[(x + shift) % step * channels * planes.size() + (x + shift) / step] = from[x];
          }
        }
      }
    }
  }
}

// The outputs that share taps: all of a convolution; of its input gradient, those with one remainder of their places.
struct Part {
  std::vector<Tap> taps;
  Three first, count, lines;  // its first place and how many in each dimension; and the sizes of the planes it reads
  // Places computed one after the other, from the first to the last.
  int64_t length() const {
    return product_of(count) == 0 ? 0 : flat({count[0] - 1, count[1] - 1, count[2] - 1}, lines) + 1;
  }
};

// All outputs of one part, for a block of channels: out[m * places + index(place)].
template <class Write>
void run_part(const ConvEachKernels& k, const Part& part, const float* weights, int rows, const float* planes,
              const Write& write) {
  const int64_t tile = k.vectors * k.lanes, length = part.length(), stride = divide_up(length, tile) * tile;
  float* lines = scratch(3, k.block * stride);
  const float* in = planes + flat(part.first, part.lines);
  for (int64_t at = 0; at < length; at += tile) {
    const int64_t vectors = std::min<int64_t>(k.vectors, divide_up(length - at, k.lanes));
    k.tapped(weights, rows, in + at, static_cast<int>(vectors), part.taps.data(),
             static_cast<int64_t>(part.taps.size()), lines + at, stride);
  }
  for (int m = 0; m < rows; ++m) {
    for (int64_t z = 0; z < part.count[0]; ++z) {
      for (int64_t y = 0; y < part.count[1]; ++y) write(m, z, y, lines + m * stride + flat({z, y, 0}, part.lines));
    }
  }
}

// Runs work(group of a sample, first block, last block) over all groups of all samples.
template <class Work>
void in_units(int64_t groups, int64_t blocks, const Work& work) {
  const int64_t parts = parts_of(groups, blocks);
  parallel_for(0, groups * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t part = unit % parts;
      work(unit / parts, blocks * part / parts, blocks * (part + 1) / parts);
    }
  });
}

// Where the weights of a group of an image are, among all groups of all weights; each weight is that of a run of
// images.
struct Owners {
  int64_t groups, each;
  int64_t operator()(int64_t group) const { return group / groups / each * groups + group % groups; }
};

Owners owners_of(const Tensor& images, const Tensor& w, int64_t groups) {
  const int64_t batch = images.size(0), each = w.size(0) ? batch / w.size(0) : 0;
  STD_TORCH_CHECK(w.size(0) * each == batch, "conv_each: sizes do not fit together");
  return {groups, each};
}

Convolution sizes_of(const Tensor& images, const Tensor& w, const Three& in, const Three& out,
                     const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                     const std::vector<int64_t>& dilation, int64_t groups) {
  const auto all_above = [&](const std::vector<int64_t>& values, int64_t low) {
    const auto dims = static_cast<size_t>(images.dim() - 2);
    return values.size() == dims && std::all_of(values.begin(), values.end(), [&](int64_t v) { return v > low; });
  };
  STD_TORCH_CHECK(
      all_above(stride, 0) && all_above(padding, -1) && all_above(dilation, 0) && groups > 0,
      "dpkernels: a convolution must have a stride and a dilation above 0, a padding of at least 0, one for "
      "each dimension");
  return {images.size(0),  groups,           w.size(2),         w.size(1) / groups, in, out,
          places_of(w, 3), three(stride, 1), three(padding, 0), three(dilation, 1)};
}

Tensor output(int64_t batch, int64_t channels, const std::vector<int64_t>& size) {
  std::vector<int64_t> sizes{batch, channels};
  sizes.insert(sizes.end(), size.begin(), size.end());
  return empty(sizes.data(), static_cast<int64_t>(sizes.size()), ScalarType::Float);
}

}  // namespace

Tensor conv_each(const Tensor& x_given, const Tensor& w_given, std::vector<int64_t> size, std::vector<int64_t> stride,
                 std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  const Tensor x = torch::stable::contiguous(x_given), w = torch::stable::contiguous(w_given);
  const Convolution s = sizes_of(x, w, places_of(x, 2), three(size, 1), stride, padding, dilation, groups);
  STD_TORCH_CHECK(w.dim() == x.dim() + 1 && x.size(1) == s.inputs * groups, "conv_each: sizes do not fit together");
  const Owners owner = owners_of(x, w, groups);
  Tensor y = output(s.batch, w.size(1), size);
  if (y.numel() == 0) return y;
  const ConvEachKernels& k = conv_each_kernels();
  Planes planes{{}, s.stride, s.padding};
  const Three reach = s.reach();
  for (size_t d = 0; d < 3; ++d) planes.sizes[d] = divide_up(reach[d], s.stride[d]);
  Part part{{}, {0, 0, 0}, s.out, planes.sizes};
  const int64_t count = product_of(s.kernel), row = s.inputs * count;
  for (int64_t c = 0; c < s.inputs; ++c) {
    for_places(s.kernel, [&](const Three& at) {
      Three phase{}, moved{};
      for (size_t d = 0; d < 3; ++d) {
        phase[d] = at[d] * s.dilation[d] % s.stride[d], moved[d] = at[d] * s.dilation[d] / s.stride[d];
      }
      part.taps.push_back({(flat(phase, s.stride) * s.inputs + c) * planes.size() + flat(moved, planes.sizes),
                           static_cast<int64_t>(part.taps.size()) * k.block});
    });
  }
  const auto *x_data = x.const_data_ptr<float>(), *w_data = w.const_data_ptr<float>();
  auto* y_data = y.mutable_data_ptr<float>();
  const int64_t places = product_of(s.out), in_places = product_of(s.in), slack = k.vectors * k.lanes;
  in_units(s.batch * groups, divide_up(s.outputs, k.block), [&](int64_t group, int64_t begin, int64_t end) {
    float* packed = scratch(0, planes.phases() * s.inputs * planes.size() + slack);
    pack_planes(planes, s.in, x_data + group * s.inputs * in_places, s.inputs, packed);
    float* weights = scratch(1, row * k.block);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = group * s.outputs + b * k.block;
      const int rows = static_cast<int>(std::min<int64_t>(k.block, s.outputs - b * k.block));
      const float* from_weights = w_data + (owner(group) * s.outputs + b * k.block) * row;
      weight_row_kernels().interleave(from_weights, row, rows, row, weights, k.block);
      run_part(k, part, weights, rows, packed, [&](int m, int64_t z, int64_t line, const float* from) {
        std::copy_n(from, s.out[2], y_data + (first + m) * places + (z * s.out[1] + line) * s.out[2]);
      });
    }
  });
  return y;
}

Tensor conv_each_input(const Tensor& g_given, const Tensor& w_given, std::vector<int64_t> size,
                       std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                       int64_t groups) {
  const Tensor g = torch::stable::contiguous(g_given), w = torch::stable::contiguous(w_given);
  const Convolution s = sizes_of(g, w, three(size, 1), places_of(g, 2), stride, padding, dilation, groups);
  STD_TORCH_CHECK(w.dim() == g.dim() + 1 && g.size(1) == w.size(1), "conv_each_input: sizes do not fit together");
  const Owners owner = owners_of(g, w, groups);
  Tensor dx = output(s.batch, s.inputs * groups, size);
  if (dx.numel() == 0) return dx;
  const ConvEachKernels& k = conv_each_kernels();
  // Image place q is place (q + padding) / stride among those with its remainder; it looks back by 0 to `most` of g's.
  Three most{}, low{}, high{};
  for (size_t d = 0; d < 3; ++d) {
    most[d] = (s.kernel[d] - 1) * s.dilation[d] / s.stride[d];
    low[d] = s.padding[d] / s.stride[d];
    high[d] = (s.padding[d] + s.in[d] - 1) / s.stride[d] + 1;
  }
  Planes planes{{}, {1, 1, 1}, {}};
  for (size_t d = 0; d < 3; ++d) {
    planes.shift[d] = most[d] - low[d];
    planes.sizes[d] = high[d] - low[d] + most[d];
  }
  const int64_t count = product_of(s.kernel);
  std::vector<Part> parts;
  std::vector<Three> phases;
  for_places(s.stride, [&](const Three& phase) {
    Part part{{}, {}, {}, planes.sizes};
    for (size_t d = 0; d < 3; ++d) {  // places q * stride + phase - padding of the image
      const int64_t first = divide_up(std::max<int64_t>(s.padding[d] - phase[d], 0), s.stride[d]);
      const int64_t last = s.padding[d] + s.in[d] - 1 - phase[d];
      part.first[d] = first - low[d];
      part.count[d] = last < 0 ? 0 : std::max<int64_t>(last / s.stride[d] - first + 1, 0);
    }
    for (int64_t o = 0; o < s.outputs; ++o) {
      int64_t number = 0;
      for_places(s.kernel, [&](const Three& at) {
        Three back{};
        bool meets = true;
        for (size_t d = 0; d < 3; ++d) {
          meets = meets && at[d] * s.dilation[d] % s.stride[d] == phase[d];
          back[d] = most[d] - at[d] * s.dilation[d] / s.stride[d];
        }
        if (meets) part.taps.push_back({o * planes.size() + flat(back, planes.sizes), (o * count + number) * k.block});
        ++number;
      });
    }
    parts.push_back(part);
    phases.push_back(phase);
  });
  const auto *g_data = g.const_data_ptr<float>(), *w_data = w.const_data_ptr<float>();
  auto* dx_data = dx.mutable_data_ptr<float>();
  const int64_t places = product_of(s.in), out_places = product_of(s.out), slack = k.vectors * k.lanes;
  in_units(s.batch * groups, divide_up(s.inputs, k.block), [&](int64_t group, int64_t begin, int64_t end) {
    float* packed = scratch(0, s.outputs * planes.size() + slack);
    pack_planes(planes, s.out, g_data + group * s.outputs * out_places, s.outputs, packed);
    float* weights = scratch(1, s.outputs * count * k.block);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * k.block;
      const int rows = static_cast<int>(std::min<int64_t>(k.block, s.inputs - first));
      for (int64_t o = 0; o < s.outputs; ++o) {
        const float* from = w_data + ((owner(group) * s.outputs + o) * s.inputs + first) * count;
        weight_row_kernels().interleave(from, count, rows, count, weights + o * count * k.block, k.block);
      }
      for (size_t p = 0; p < parts.size(); ++p) {
        const Part& part = parts[p];
        Three start{};
        for (size_t d = 0; d < 3; ++d) start[d] = (part.first[d] + low[d]) * s.stride[d] + phases[p][d] - s.padding[d];
        run_part(k, part, weights, rows, packed, [&](int m, int64_t z, int64_t y, const float* from) {
          float* to = dx_data + (group * s.inputs + first + m) * places +
                      flat({start[0] + z * s.stride[0], start[1] + y * s.stride[1], start[2]}, s.in);
          if (s.stride[2] == 1) {
            std::copy_n(from, part.count[2], to);
          } else {
            for (int64_t i = 0; i < part.count[2]; ++i) to[i * s.stride[2]] = from[i];
          }
        });
      }
    }
  });
  return dx;
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("conv_each", TORCH_BOX(&dpk::conv_each));
  m.impl("conv_each_input", TORCH_BOX(&dpk::conv_each_input));
}
