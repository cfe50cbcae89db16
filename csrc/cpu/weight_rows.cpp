#include "weight_rows.h"

#define DPK_KERNEL_FILE "weight_rows_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const WeightRowKernels& weight_row_kernels() {
  static constexpr WeightRowKernels tables[] = DPK_TABLES(weight_rows);
  return tables[static_cast<int>(active_isa())];
}

}  // namespace dpk
