// Floats of a thread, kept between calls; not filled.
#pragma once
#include <cstdint>

namespace dpk {

float* scratch(int which, int64_t floats);  // which < 4

}  // namespace dpk
