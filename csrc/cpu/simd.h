// The vectors of one instruction set: DPK_LANES floats, or half as many doubles. Compiler vector types do
// nearly everything; the few intrinsics below are what the compiler does not find by itself. (AVX-512 ones are
// taken in their zero-masked form: GCC 12 warns about the plain ones.)
// Included inside the namespace of each instruction set, hence no guard.

constexpr int lanes = DPK_LANES;
constexpr int double_lanes = DPK_LANES / 2;

typedef float Floats __attribute__((vector_size(DPK_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(DPK_LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(DPK_LANES * 4)));
typedef uint64_t Longs __attribute__((vector_size(DPK_LANES * 4)));
typedef int64_t SignedLongs __attribute__((vector_size(DPK_LANES * 4)));
typedef double Doubles __attribute__((vector_size(DPK_LANES * 4)));
typedef float HalfFloats __attribute__((vector_size(DPK_LANES * 2)));
typedef uint32_t HalfWords __attribute__((vector_size(DPK_LANES * 2)));
typedef int32_t HalfInts __attribute__((vector_size(DPK_LANES * 2)));
typedef uint16_t QuarterShorts __attribute__((vector_size(DPK_LANES)));

template <class V>
inline V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
inline void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// 64-bit product of the low halves of each 64-bit lane; what stands in the high halves does not matter.
inline Longs multiply_low_halves(Longs a, Longs b) {
#if !DPK_HAVE_X86_VARIANTS
  return (a & 0xFFFFFFFFull) * (b & 0xFFFFFFFFull);
#elif DPK_LANES == 16
  return (Longs)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);
#elif DPK_LANES == 8
  return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
}

// Bit l is the sign bit of lane l.
inline uint32_t sign_bits(Ints mask) {
#if !DPK_HAVE_X86_VARIANTS
  uint32_t bits = 0;
  for (int l = 0; l < lanes; ++l) bits |= static_cast<uint32_t>(mask[l] < 0) << l;
  return bits;
#elif DPK_LANES == 16
  return _mm512_movepi32_mask((__m512i)mask);
#elif DPK_LANES == 8
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)mask));
#endif
}

// x within [-limit, limit]; what is not a number becomes the limit.
inline Floats clamped(Floats x, Floats limit) {
#if !DPK_HAVE_X86_VARIANTS
  x = x < limit ? x : limit;
  return x > -limit ? x : -limit;
#elif DPK_LANES == 16
  return (Floats)_mm512_maskz_max_ps(0xFFFF, _mm512_maskz_min_ps(0xFFFF, (__m512)x, (__m512)limit), (__m512)-limit);
#elif DPK_LANES == 8
  return (Floats)_mm256_max_ps(_mm256_min_ps((__m256)x, (__m256)limit), (__m256)-limit);
#else
  return (Floats)_mm_max_ps(_mm_min_ps((__m128)x, (__m128)limit), (__m128)-limit);
#endif
}

// The same for numbers.
inline Doubles clamped(Doubles x, Doubles limit) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  return (Doubles)_mm512_maskz_range_pd(0xFF, (__m512d)x, (__m512d)limit, 2);  // the smaller one, with the sign of x
#else
  x = x < limit ? x : limit;
  return x > -limit ? x : -limit;
#endif
}

inline double clamped(double x, double limit) {
  x = x < limit ? x : limit;
  return x > -limit ? x : -limit;
}

inline float clamped(float x, float limit) {
  x = x < limit ? x : limit;
  return x > -limit ? x : -limit;
}

// The lower and the upper half of the lanes.
inline HalfFloats low_half(Floats x) { return load<HalfFloats>(&x); }

inline HalfFloats high_half(Floats x) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  return (HalfFloats)_mm512_maskz_extractf32x8_ps(0xFF, (__m512)x, 1);
#elif DPK_HAVE_X86_VARIANTS && DPK_LANES == 8
  return (HalfFloats)_mm256_extractf128_ps((__m256)x, 1);
#else
  return load<HalfFloats>(reinterpret_cast<const char*>(&x) + sizeof(HalfFloats));
#endif
}

inline Floats square_root(Floats x) {
#if !DPK_HAVE_X86_VARIANTS
  for (int l = 0; l < lanes; ++l) x[l] = __builtin_sqrtf(x[l]);
  return x;
#elif DPK_LANES == 16
  return (Floats)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)x);
#elif DPK_LANES == 8
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  return (Floats)_mm_sqrt_ps((__m128)x);
#endif
}

inline Doubles square_root(Doubles x) {
#if !DPK_HAVE_X86_VARIANTS
  for (int l = 0; l < double_lanes; ++l) x[l] = __builtin_sqrt(x[l]);
  return x;
#elif DPK_LANES == 16
  return (Doubles)_mm512_maskz_sqrt_pd(0xFF, (__m512d)x);
#elif DPK_LANES == 8
  return (Doubles)_mm256_sqrt_pd((__m256d)x);
#else
  return (Doubles)_mm_sqrt_pd((__m128d)x);
#endif
}

// float to double, lane by lane.
inline Doubles widen_floats(HalfFloats x) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  return (Doubles)_mm512_maskz_cvtps_pd(0xFF, (__m256)x);
#elif DPK_HAVE_X86_VARIANTS && DPK_LANES == 8
  return (Doubles)_mm256_cvtps_pd((__m128)x);
#else
  return __builtin_convertvector(x, Doubles);
#endif
}

// double to float, lane by lane.
inline HalfFloats narrow_doubles(Doubles x) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  return (HalfFloats)_mm512_maskz_cvtpd_ps(0xFF, (__m512d)x);
#elif DPK_HAVE_X86_VARIANTS && DPK_LANES == 8
  return (HalfFloats)_mm256_cvtpd_ps((__m256d)x);
#else
  return __builtin_convertvector(x, HalfFloats);
#endif
}

// uint16 to uint32, lane by lane.
inline HalfWords widen_shorts(QuarterShorts x) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  return (HalfWords)_mm256_cvtepu16_epi32((__m128i)x);
#elif DPK_HAVE_X86_VARIANTS && DPK_LANES == 8
  return (HalfWords)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)&x));
#else
  return __builtin_convertvector(x, HalfWords);
#endif
}

// uint32 to uint64, lane by lane.
inline Longs widen_words(HalfWords x) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  return (Longs)_mm512_maskz_cvtepu32_epi64(0xFF, (__m256i)x);
#elif DPK_HAVE_X86_VARIANTS && DPK_LANES == 8
  return (Longs)_mm256_cvtepu32_epi64((__m128i)x);
#else
  return __builtin_convertvector(x, Longs);
#endif
}

inline Doubles widen(const float* p) { return widen_floats(load<HalfFloats>(p)); }
inline Doubles widen(const double* p) { return load<Doubles>(p); }
inline void narrow(float* p, Doubles x) { store(p, narrow_doubles(x)); }
inline void narrow(double* p, Doubles x) { store(p, x); }

// The sum of all lanes, as a tree: the upper half goes to the lower one, until one is left.
inline float sum_of_lanes(Floats x) {
#if !DPK_HAVE_X86_VARIANTS
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) x[l] += x[l + half];
  }
  return x[0];
#else
#if DPK_LANES == 16
  const __m256 eight = (__m256)(low_half(x) + high_half(x));
#elif DPK_LANES == 8
  const __m256 eight = (__m256)x;
#endif
#if DPK_LANES == 4
  const __m128 four = (__m128)x;
#else
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#endif
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#endif
}

inline double sum_of_lanes(Doubles x) {
#if !DPK_HAVE_X86_VARIANTS
  for (int half = double_lanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) x[l] += x[l + half];
  }
  return x[0];
#else
#if DPK_LANES == 16
  const __m256d four = _mm256_add_pd((__m256d)_mm512_maskz_extractf64x4_pd(0xF, (__m512d)x, 0),
                                     (__m256d)_mm512_maskz_extractf64x4_pd(0xF, (__m512d)x, 1));
#elif DPK_LANES == 8
  const __m256d four = (__m256d)x;
#endif
#if DPK_LANES == 4
  const __m128d two = (__m128d)x;
#else
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
#endif
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
#endif
}
