// Secure noise in bulk: ChaCha20 words, normals in double precision, and their sum with data on a lattice.
//
//   words:   out[b][w] = word w of block first_block + b
//   normals: out[i] = the standard normal of element 64 * first_group + i of the stream's release
//   add:     out[i] = (round(x[i] / s) + round(std z[i] / s)) * s * scale,   s = 2^(floor(log2 std) - 30)
//
// Both roundings give integers, added exactly: what leaves is a sum of integers times constants, and its low bits tell
// no more than the integer does. x / s is held to +-2^51 (which brings no two values of x further apart), so that
// integers stay exact in float64. The result depends on the element alone, not on threads; z up to rounding not on the
// instruction set either. Limit: arithmetic.
#pragma once
#include "../common/chacha20.h"

namespace dpk {

struct Lattice {
  double step, inverse, std_steps;  // s, 1 / s, std / s
  explicit Lattice(double std);
};

struct SecureKernels {
  void (*words)(uint32_t* out, int64_t blocks, uint64_t first_block, const SecureStream& stream, Purpose purpose);
  void (*normals)(double* out, int64_t groups, uint64_t first_group, const SecureStream& stream);
  void (*add_to_float)(float* out, const float* x, const double* z, int64_t n, const Lattice& lattice, double scale);
  void (*add_to_double)(double* out, const double* x, const double* z, int64_t n, const Lattice& lattice, double scale);
  void (*add_to_rounded)(float* out, const double* x, const double* z, int64_t n, const Lattice& lattice, double scale);
};

const SecureKernels& secure_kernels();

}  // namespace dpk
