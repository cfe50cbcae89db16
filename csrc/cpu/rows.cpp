#include "rows.h"

#include "isa.h"
#if DPK_HAVE_X86_VARIANTS
#include <immintrin.h>
#endif

#define DPK_KERNEL_FILE "rows_kernel.h"
#include "foreach_isa.h"

namespace dpk {

const RowKernels& row_kernels() {
  static constexpr RowKernels tables[] = {
      portable::rows::table,
#if DPK_HAVE_X86_VARIANTS
      avx2::rows::table,
      avx512::rows::table,
#endif
  };
  return tables[static_cast<int>(active_isa())];
}

}  // namespace dpk
