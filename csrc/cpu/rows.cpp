#include "rows.h"

#define DPK_KERNEL_FILE "rows_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const RowKernels& row_kernels() {
  static constexpr RowKernels tables[] = DPK_TABLES(rows);
  return tables[static_cast<int>(active_isa())];
}

Fetch fetch_from_afar() { return is_intel() ? Fetch::own : Fetch::last_time; }

}  // namespace dpk
