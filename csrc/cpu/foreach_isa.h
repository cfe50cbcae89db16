// Includes DPK_KERNEL_FILE once per instruction set, each time inside namespace dpk::DPK_ISA and with
// DPK_LANES floats to a vector. Include every system header before this one: what is compiled inside a
// region may use its instructions, so kernel files call nothing from the standard library.
// A kernel file ends in a constexpr `table` in a namespace of its own; DPK_TABLES(name) lists those of all sets, in the
// order of `Isa`.
#include "isa.h"
#if DPK_HAVE_X86_VARIANTS
#include <immintrin.h>
#endif

#if DPK_HAVE_X86_VARIANTS
#define DPK_TABLES(name) {portable::name::table, avx2::name::table, avx512::name::table}
#else
#define DPK_TABLES(name) {portable::name::table}
#endif

#define DPK_ISA portable
#define DPK_LANES 4
#include DPK_KERNEL_FILE
#undef DPK_ISA
#undef DPK_LANES

#if DPK_HAVE_X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi")
#define DPK_ISA avx2
#define DPK_LANES 8
#include DPK_KERNEL_FILE
#undef DPK_ISA
#undef DPK_LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,prefer-vector-width=512")
#define DPK_ISA avx512
#define DPK_LANES 16
#include DPK_KERNEL_FILE
#undef DPK_ISA
#undef DPK_LANES
#pragma GCC pop_options
#endif
