#include "normals.h"

#include <algorithm>
#include <iterator>

#define DPK_KERNEL_FILE "normals_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const RandomKernels& random_kernels() {
  static constexpr RandomKernels tables[] = DPK_TABLES(random);
  return tables[static_cast<int>(active_isa())];
}

NoiseAdder::NoiseAdder(const Noise& noise)
    : noise_(noise), kernels_(random_kernels()), secure_kernels_(dpk::secure_kernels()), lattice_(noise.std) {
  std::fill(std::begin(normals_), std::end(normals_), 0.0f);
}

template <class Out, class X>
void NoiseAdder::add_in_turns(Out* out, const X* x, int64_t n, int64_t first, double scale,
                              void (*plain)(Out*, const X*, const float*, int64_t, double, double),
                              void (*secure)(Out*, const X*, const double*, int64_t, const Lattice&, double)) {
  for (int64_t i = 0; i < n;) {
    const int64_t skip = (first + i) % group_elements;  // 0 after the first turn
    const int64_t length = std::min(n - i, turn - skip);
    const int64_t groups = (skip + length + group_elements - 1) / group_elements;
    const auto group = static_cast<uint64_t>((first + i) / group_elements);
    if (noise_.secure) {
      secure_kernels_.normals(secure_normals_, groups, group, noise_.secure_stream);
      secure(out + i, x + i, secure_normals_ + skip, length, lattice_, scale);
    } else {
      if (noise_.on) kernels_.normals(normals_, groups, group, noise_.stream);
      plain(out + i, x + i, normals_ + skip, length, noise_.std, scale);
    }
    i += length;
  }
}

void NoiseAdder::add(float* out, const float* x, int64_t n, int64_t first, double scale) {
  add_in_turns(out, x, n, first, scale, kernels_.add_to_float, secure_kernels_.add_to_float);
}

void NoiseAdder::add(double* out, const double* x, int64_t n, int64_t first, double scale) {
  add_in_turns(out, x, n, first, scale, kernels_.add_to_double, secure_kernels_.add_to_double);
}

void NoiseAdder::add(float* out, const double* x, int64_t n, int64_t first, double scale) {
  add_in_turns(out, x, n, first, scale, kernels_.add_to_rounded, secure_kernels_.add_to_rounded);
}

}  // namespace dpk
