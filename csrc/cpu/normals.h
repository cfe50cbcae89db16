// Random numbers in bulk: standard normals for noise, Bernoulli bits for masks.
//
//   normals: out[i] = the standard normal of element 64 * first_group + i of the stream's release
//   mask:    bit j of bits[g] = [word of element 64 * (first_group + g) + j is below threshold]
//
//   add:     out[i] = (x[i] + std * z[i]) * scale, in float64, rounded once
//
// Counter-based (common/philox.h), so the result depends on the element alone: not on threads, nor, up to
// the rounding of fused multiply-adds, on the instruction set. Limit: arithmetic, about 3 cycles a normal.
#pragma once
#include <cstdint>

#include "../common/noise.h"
#include "secure_normals.h"

namespace dpk {

struct RandomKernels {
  void (*normals)(float* out, int64_t groups, uint64_t first_group, Stream stream);
  void (*mask)(uint64_t* bits, int64_t groups, uint64_t first_group, Stream stream, uint32_t threshold);
  void (*add_to_float)(float* out, const float* x, const float* z, int64_t n, double std, double scale);
  void (*add_to_double)(double* out, const double* x, const float* z, int64_t n, double std, double scale);
  void (*add_to_rounded)(float* out, const double* x, const float* z, int64_t n, double std, double scale);
};

const RandomKernels& random_kernels();

// Adds a release's noise to stretches of its elements; without noise, only scales and rounds.
//   out[i] = (x[i] + std * z of element first + i) * scale,   secure noise on its lattice (secure_normals.h)
class NoiseAdder {
 public:
  explicit NoiseAdder(const Noise& noise);
  void add(float* out, const float* x, int64_t n, int64_t first, double scale = 1.0);
  void add(double* out, const double* x, int64_t n, int64_t first, double scale = 1.0);
  void add(float* out, const double* x, int64_t n, int64_t first, double scale = 1.0);

 private:
  // Small, so that drawing normals and streaming x and out through memory overlap.
  static constexpr int64_t turn = 512;
  const Noise noise_;
  const RandomKernels& kernels_;
  const SecureKernels& secure_kernels_;
  const Lattice lattice_;
  alignas(64) float normals_[turn];
  alignas(64) double secure_normals_[turn];

  template <class Out, class X>
  void add_in_turns(Out* out, const X* x, int64_t n, int64_t first, double scale,
                    void (*plain)(Out*, const X*, const float*, int64_t, double, double),
                    void (*secure)(Out*, const X*, const double*, int64_t, const Lattice&, double));
};

}  // namespace dpk
