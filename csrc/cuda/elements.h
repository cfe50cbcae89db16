// Elements of tensors of several types, read as float64.
#pragma once
#include <cstring>

#include "../common/element.h"
#include "device.h"

namespace dpk::cuda {

DPK_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

DPK_DEVICE uint32_t float_bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

DPK_DEVICE float half_to_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu, sign = (bits & 0x8000u) << 16;
  if (magnitude < 0x400u) return float_of_bits(float_bits_of(static_cast<float>(magnitude) * 0x1p-24f) | sign);
  const uint32_t rebased = magnitude < 0x7C00u ? 112u << 23 : 224u << 23;  // of Inf and NaN, to the largest exponent
  return float_of_bits(((magnitude << 13) + rebased) | sign);
}

DPK_DEVICE double element(const void* data, Element kind, int64_t i) {
  if (kind == Element::f32) return static_cast<double>(static_cast<const float*>(data)[i]);
  if (kind == Element::f64) return static_cast<const double*>(data)[i];
  const uint32_t bits = static_cast<const uint16_t*>(data)[i];
  return static_cast<double>(kind == Element::f16 ? half_to_float(bits) : float_of_bits(bits << 16));
}

}  // namespace dpk::cuda
