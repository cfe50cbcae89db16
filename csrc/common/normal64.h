// Two 64-bit words become two standard normals (Box-Muller, double precision).
//
//   radius = sqrt(-2 ln U),  U = (word 0 + 1/2) / 2^64;   angle = 2 pi * word 1 / 2^64
//   z0 = radius cos(angle),  z1 = radius sin(angle)
//
// Below word = 2^52 the radius has fewer than 52 relative bits; there 64 further bits from the purpose `radius_tail`
// continue it: U = (word + (extra + 1/2) / 2^64) / 2^64. Next to 1, where U itself would be rounded, ln U is taken
// from 1 - U = (~word + 1/2) / 2^64, which is not: so at no size do values of the radius stand further apart than
// 2^-31.
//
// Error of z against exact arithmetic on the same words: below 2e-15 * max(1, |z|) (tested). The polynomials are
// near-minimax fits, below 1e-17: atanh(s)/s on [0, (sqrt(2)-1)^2] in s^2; sine and cosine on [-pi/4, pi/4].
//
// Included inside the namespace of each instruction set, hence no guard. `L` names the lane types D (double),
// Q (uint64) and how to cast between them.

constexpr uint64_t secure_tail_threshold = uint64_t{1} << 52;

// An integer below 2^32.
template <class L>
DPK_HOST_DEVICE inline typename L::D from_half(typename L::Q x) {
  return L::as_double(x | 0x4330000000000000ull) - 0x1p52;
}

// word + 1/2, rounded once.
template <class L>
DPK_HOST_DEVICE inline typename L::D from_word(typename L::Q word) {
  return from_half<L>(word >> 32) * 0x1p32 + (from_half<L>(word & 0xFFFFFFFFull) + 0.5);
}

// `rest` is 1 - U; it matters where U is above sqrt(1/2).
template <class L>
DPK_HOST_DEVICE inline typename L::D radius_from_uniform64(typename L::D uniform, typename L::D rest) {
  using D = typename L::D;
  using Q = typename L::Q;
  constexpr uint64_t sqrt_half = 0x3FE6A09E667F3BCDull;
  const Q offset = L::as_int(uniform) + ((uint64_t{1024} << 52) - sqrt_half);
  const D exponent = from_half<L>(offset >> 52) - 1024.0;
  D f = L::as_double((offset & 0xFFFFFFFFFFFFFull) + sqrt_half) - 1.0;
  f = L::select(exponent < 0.0, f, -rest);
  // ln(1 + f) = 2 atanh(s)
  const D s = f / (f + 2.0), w = s * s;
  D p = w * 0.07308224842521703 + 0.07665860800278021;
  p = p * w + 0.09091444562630861;
  p = p * w + 0.1111110556739754;
  p = p * w + 0.14285714312987743;
  p = p * w + 0.19999999999949752;
  p = p * w + 0.3333333333333335;
  const D square = exponent * -1.3862943611198906 - (s + s * w * p) * 4.0;
  return L::sqrt(square);
}

template <class L>
DPK_HOST_DEVICE inline typename L::D radius_from_word64(typename L::Q word) {
  return radius_from_uniform64<L>(from_word<L>(word) * 0x1p-64, from_word<L>(~word) * 0x1p-64);
}

// The radius of a word below secure_tail_threshold.
template <class L>
DPK_HOST_DEVICE inline typename L::D tail_radius64(typename L::Q word, typename L::Q extra) {
  const typename L::D exact = from_half<L>(word >> 32) * 0x1p32 + from_half<L>(word & 0xFFFFFFFFull);
  const typename L::D uniform = (exact + from_word<L>(extra) * 0x1p-64) * 0x1p-64;
  return radius_from_uniform64<L>(uniform, uniform);
}

template <class L>
DPK_HOST_DEVICE inline void normal_pair64(typename L::D radius, typename L::Q angle, typename L::D& z0,
                                          typename L::D& z1) {
  using D = typename L::D;
  using Q = typename L::Q;
  // angle = quarter turns (the top two bits of `turns`) plus x in [-pi/4, pi/4)
  const Q turns = angle + (uint64_t{1} << 61);
  const D high = from_half<L>((turns & 0x3FFFFFFFFFFFFFFFull) >> 32) - 0x1p29;
  const D x = (high * 0x1p32 + from_half<L>(turns & 0xFFFFFFFFull)) * 3.4061215800865545e-19;  // (pi/2) / 2^62
  const D t = x * x;
  D sine = t * 1.5918129294866608e-10 - 2.5051131845003624e-08;
  sine = sine * t + 2.755731610255244e-06;
  sine = sine * t - 0.00019841269836758574;
  sine = sine * t + 0.008333333333330948;
  sine = sine * t - 0.16666666666666666;
  sine = x + x * t * sine;
  D cosine = t * -1.1382632425521717e-11 + 2.08761462684032e-09;
  cosine = cosine * t - 2.7557317271729793e-07;
  cosine = cosine * t + 2.480158729876569e-05;
  cosine = cosine * t - 0.0013888888888887398;
  cosine = cosine * t + 0.041666666666666664;
  cosine = (cosine * t - 0.5) * t + 1.0;
  const Q odd = turns << 1;  // sign bit: an odd quarter, where sine and cosine change places
  const auto swapped = L::is_negative(odd);
  const D c = L::select(swapped, sine, cosine), d = L::select(swapped, cosine, sine);
  // cos is negative in quarters 1 and 2, sin in quarters 2 and 3
  z0 = L::as_double(L::as_int(radius * c) ^ ((turns ^ odd) & 0x8000000000000000ull));
  z1 = L::as_double(L::as_int(radius * d) ^ (turns & 0x8000000000000000ull));
}
