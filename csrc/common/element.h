// The types that tensors of rows may have. Torch-free; shared by CPU and CUDA.
#pragma once
#include <cstdint>

namespace dpk {

enum class Element : int { f32, f64, bf16, f16 };
constexpr int element_count = 4;
constexpr int64_t element_bytes(Element e) { return e == Element::f64 ? 8 : e == Element::f32 ? 4 : 2; }

}  // namespace dpk
