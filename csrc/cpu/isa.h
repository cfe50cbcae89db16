// Which instruction set runs. Kernels are compiled for all of them side by side (foreach_isa.h);
// the best one the CPU has is chosen when the module loads and can be changed by `use`.
#pragma once
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DPK_HAVE_X86_VARIANTS 1
#else
#define DPK_HAVE_X86_VARIANTS 0
#endif

namespace dpk {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };
constexpr int isa_count = DPK_HAVE_X86_VARIANTS ? 3 : 1;

Isa active_isa();
const char* isa_name(Isa isa);
bool is_amd();
bool is_intel();
std::vector<std::string> available_isas();
void use_isa(const std::string& name);  // throws std::invalid_argument

}  // namespace dpk
