#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace dpk {
namespace {

constexpr const char* names[] = {"portable", "avx2", "avx512"};

bool supported(Isa isa) {
#if DPK_HAVE_X86_VARIANTS
  if (isa == Isa::avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi");
  }
  if (isa == Isa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && supported(Isa::avx2);
  }
#endif
  return isa == Isa::portable;
}

Isa best() {
  for (int i = isa_count - 1; i > 0; --i) {
    if (supported(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return Isa::portable;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

Isa active_isa() { return active().load(std::memory_order_relaxed); }

const char* isa_name(Isa isa) { return names[static_cast<int>(isa)]; }

bool is_amd() {
#if DPK_HAVE_X86_VARIANTS
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

bool is_intel() {
#if DPK_HAVE_X86_VARIANTS
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
  for (int i = 0; i < isa_count; ++i) {
    if (supported(static_cast<Isa>(i))) found.emplace_back(names[i]);
  }
  return found;
}

void use_isa(const std::string& name) {
  for (int i = 0; i < isa_count; ++i) {
    if (name == names[i] && supported(static_cast<Isa>(i))) {
      active().store(static_cast<Isa>(i));
      return;
    }
  }
  std::string known;
  for (const auto& isa : available_isas()) known += " " + isa;
  throw std::invalid_argument("isa: got '" + name + "', this CPU and build have:" + known);
}

}  // namespace dpk
