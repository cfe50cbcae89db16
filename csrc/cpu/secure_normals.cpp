#include "secure_normals.h"

#include <cmath>

#define DPK_KERNEL_FILE "secure_normals_kernel.h"
#include "foreach_isa.h"

namespace dpk {

Lattice::Lattice(double std) {
  const int exponent = std > 0 ? std::ilogb(std) - 30 : 0;
  step = std::ldexp(1.0, exponent);
  inverse = std::ldexp(1.0, -exponent);
  std_steps = std * inverse;
}

const SecureKernels& secure_kernels() {
  static constexpr SecureKernels tables[] = DPK_TABLES(secure);
  return tables[static_cast<int>(active_isa())];
}

}  // namespace dpk
