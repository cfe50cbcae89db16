// Two words become two standard normals (Box-Muller, single precision).
//
//   radius = sqrt(-2 ln U),  U from word 0;   angle = 2 pi * word 1 / 2^32
//   z0 = radius cos(angle),  z1 = radius sin(angle)
//
// U = (word / 2 + 1/2) / 2^31 keeps at least 19 relative bits down to word = 2^20. Below that the word alone
// would cut the tail at 6.6 sigma, so 32 further bits from the purpose `radius_tail` continue it:
// U = (word + (extra + 1/2) / 2^32) / 2^32, at least 20 relative bits, right beyond 9 sigma.
//
// Error of z against exact arithmetic on the same words: below 1e-6 + 1.2e-7 / radius (tested); the second
// part is the rounding of U next to 1. The polynomials are near-minimax fits: ln(1+f)/f on
// [sqrt(1/2)-1, sqrt(2)-1] to 3e-8, sin(x)/x and cos(x) on [-pi/4, pi/4] to 3e-9 and 3e-8.
//
// Included inside the namespace of each instruction set, hence no guard. `L` names the lane types F
// (float), I (int32), U (uint32) and how to cast between them.

constexpr uint32_t tail_threshold = 1u << 20;

// U for a word below tail_threshold.
DPK_HOST_DEVICE inline float tail_uniform(uint32_t word, uint32_t extra) {
  return static_cast<float>((word + (extra + 0.5) * 0x1p-32) * 0x1p-32);
}

template <class L>
DPK_HOST_DEVICE inline typename L::F uniform_from_word(typename L::U word) {
  return L::to_float((typename L::I)(word >> 1)) * 0x1p-31f + 0x1p-32f;
}

template <class L>
DPK_HOST_DEVICE inline typename L::F radius_from_uniform(typename L::F uniform) {
  using F = typename L::F;
  using I = typename L::I;
  constexpr int32_t sqrt_half = 0x3F3504F3;
  const I offset = L::as_int(uniform) - sqrt_half;
  const F exponent = L::to_float(offset >> 23);
  const F f = L::as_float((offset & 0x7FFFFF) + sqrt_half) - 1.0f;
  // -2 ln(1+f) / f
  F p = f * (-2 * 0.0872224326f) + (2 * 0.143667882f);
  p = p * f - (2 * 0.14952283f);
  p = p * f + (2 * 0.165624019f);
  p = p * f - (2 * 0.199568328f);
  p = p * f + (2 * 0.250020737f);
  p = p * f - (2 * 0.333341856f);
  p = p * f + (2 * 0.49999988f);
  p = p * f - 2.0f;
  return L::sqrt(exponent * -1.38629436f + p * f);  // U <= 1, so this is never negative
}

template <class L>
DPK_HOST_DEVICE inline void normal_pair(typename L::F radius, typename L::U angle, typename L::F& z0,
                                        typename L::F& z1) {
  using F = typename L::F;
  using I = typename L::I;
  using U = typename L::U;
  // angle = quarter turns (the top two bits of `turns`) plus x in [-pi/4, pi/4)
  const U turns = angle + (1u << 29);
  const F x = L::to_float((I)((turns & 0x3FFFFFFFu) - (1u << 29))) * 1.46291808e-9f;  // (pi/2) / 2^30
  const F s = x * x;
  F sine = s * -0.00019501822f + 0.00833201645f;
  sine = sine * s - 0.166666502f;
  sine = (sine * s + 1.0f) * x;
  F cosine = s * -0.0013579404f + 0.0416544196f;
  cosine = cosine * s - 0.499998424f;
  cosine = cosine * s + 0.999999967f;
  const U odd = turns << 1;  // sign bit: an odd quarter, where sine and cosine change places
  const F c = L::select((I)odd < 0, sine, cosine), d = L::select((I)odd < 0, cosine, sine);
  // cos is negative in quarters 1 and 2, sin in quarters 2 and 3
  z0 = L::as_float(L::as_int(radius * c) ^ (I)((turns ^ odd) & 0x80000000u));
  z1 = L::as_float(L::as_int(radius * d) ^ (I)(turns & 0x80000000u));
}
