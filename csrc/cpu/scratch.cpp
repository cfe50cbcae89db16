#include "scratch.h"

#include <array>
#include <cstddef>
#include <vector>

namespace dpk {

float* scratch(int which, int64_t floats) {
  static thread_local std::array<std::vector<float>, 4> kept;
  auto& memory = kept[static_cast<size_t>(which)];
  if (memory.size() < static_cast<size_t>(floats)) memory.resize(static_cast<size_t>(floats));
  return memory.data();
}

}  // namespace dpk
