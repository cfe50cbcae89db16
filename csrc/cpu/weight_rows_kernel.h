// The vector code behind weight_rows.h.
namespace dpk::DPK_ISA {
namespace weight_rows {

#include "simd.h"

constexpr int block = DPK_LANES == 16 ? 8 : 4;  // with three vectors of a run, what the registers hold

template <class Vector, int rows, int vectors>
void product_of(const float* g, const float* run, const Walk& walk, float* tile, int64_t tile_stride, bool onto) {
  constexpr int step = sizeof(Vector) / sizeof(float);
  Vector sum[rows][vectors] = {};
  for (int64_t z = 0; z < walk.count[0]; ++z) {
    for (int64_t y = 0; y < walk.count[1]; ++y) {
      const float* at = run + z * walk.step[0] + y * walk.step[1];
      for (int64_t x = 0; x < walk.count[2]; ++x) {
        Vector inputs[vectors];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; ++v) inputs[v] = load<Vector>(at + v * step);
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 3
          for (int v = 0; v < vectors; ++v) sum[m][v] += g[m] * inputs[v];
        }
        g += block;
        at += walk.step[2];
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) {
      float* to = tile + m * tile_stride + v * step;
      store(to, onto ? load<Vector>(to) + sum[m][v] : sum[m][v]);
    }
  }
}

template <int rows>
void product_of_rows(const float* g, const float* run, int64_t width, const Walk& walk, float* tile, int64_t stride,
                     bool onto) {
  if (width <= lanes / 2) return product_of<HalfFloats, rows, 1>(g, run, walk, tile, stride, onto);
  if (width <= lanes) return product_of<Floats, rows, 1>(g, run, walk, tile, stride, onto);
  if (width <= 2 * lanes) return product_of<Floats, rows, 2>(g, run, walk, tile, stride, onto);
  product_of<Floats, rows, 3>(g, run, walk, tile, stride, onto);
}

void product(const float* g, int rows, const float* run, int64_t width, const Walk& walk, float* tile, int64_t stride,
             bool onto) {
  int m = 0;
  for (; rows - m >= block; m += block) product_of_rows<block>(g, run, width, walk, tile, stride, onto);
  for (; rows - m >= 4; m += 4) product_of_rows<4>(g + m, run, width, walk, tile + m * stride, stride, onto);
  for (; rows - m >= 2; m += 2) product_of_rows<2>(g + m, run, width, walk, tile + m * stride, stride, onto);
  if (m < rows) product_of_rows<1>(g + m, run, width, walk, tile + m * stride, stride, onto);
}

typedef float Block __attribute__((vector_size(4 * block)));

void pack(const float* from, int64_t from_stride, int64_t count, int64_t width, float* to, int64_t to_stride,
          int64_t to_width) {
  for (int64_t t = 0; t < count; ++t) {
    const float* in = from + t * from_stride;
    float* out = to + t * to_stride;
    int64_t j = 0;
    for (; j + block <= width; j += block) store(out + j, load<Block>(in + j));
    for (; j < width; ++j) out[j] = in[j];
    for (; j < to_width; ++j) out[j] = 0.0f;
  }
}

inline void store_past_caches(float* to, Floats value) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  _mm512_stream_ps(to, (__m512)value);
#elif DPK_HAVE_X86_VARIANTS && DPK_LANES == 8
  _mm256_stream_ps(to, (__m256)value);
#elif DPK_HAVE_X86_VARIANTS
  _mm_stream_ps(to, (__m128)value);
#else
  store(to, value);
#endif
}

double finish(const float* tile, int64_t stride, int rows, int64_t width, float* out, int64_t out_stride,
              bool past_caches) {
  const auto aligned = [](int64_t bytes) { return bytes % static_cast<int64_t>(sizeof(Floats)) == 0; };
  past_caches = past_caches && aligned(reinterpret_cast<intptr_t>(out)) && (rows == 1 || aligned(out_stride * 4));
  Doubles sum[2] = {};
  double rest = 0.0;
  for (int m = 0; m < rows; ++m) {
    const float* row = tile + m * stride;
    float* to = out == nullptr ? nullptr : out + m * out_stride;
    int64_t j = 0;
    for (; j + lanes <= width; j += lanes) {
      const Doubles low = widen_floats(load<HalfFloats>(row + j));
      const Doubles high = widen_floats(load<HalfFloats>(row + j + double_lanes));
      sum[0] += low * low;
      sum[1] += high * high;
      if (to == nullptr) continue;
      if (past_caches) {
        store_past_caches(to + j, load<Floats>(row + j));
      } else {
        store(to + j, load<Floats>(row + j));
      }
    }
    for (; j < width; ++j) {
      rest += static_cast<double>(row[j]) * static_cast<double>(row[j]);
      if (to != nullptr) to[j] = row[j];
    }
  }
  const Doubles total = sum[0] + sum[1];
  for (int l = 0; l < double_lanes; ++l) rest += total[l];
  return rest;
}

void add(const float* tile, int64_t stride, int rows, int64_t width, float scale, float* out, int64_t out_stride) {
  for (int m = 0; m < rows; ++m) {
    const float* row = tile + m * stride;
    float* to = out + m * out_stride;
    int64_t j = 0;
    for (; j + lanes <= width; j += lanes) store(to + j, load<Floats>(to + j) + scale * load<Floats>(row + j));
    for (; j < width; ++j) to[j] += scale * row[j];
  }
}

void clamp_add(const float* tile, int64_t stride, int rows, int64_t width, float limit, double* out,
               int64_t out_stride) {
  for (int m = 0; m < rows; ++m) {
    const float* row = tile + m * stride;
    double* to = out + m * out_stride;
    int64_t j = 0;
    for (; j + lanes <= width; j += lanes) {
      const Floats x = clamped(load<Floats>(row + j), Floats{} + limit);
      store(to + j, load<Doubles>(to + j) + widen_floats(low_half(x)));
      store(to + j + double_lanes, load<Doubles>(to + j + double_lanes) + widen_floats(high_half(x)));
    }
    for (; j < width; ++j) to[j] += static_cast<double>(clamped(row[j], limit));
  }
}

constexpr int clamp_rows = 5, clamp_vectors = DPK_LANES == 16 ? 4 : 2;  // of doubles: their sums are in registers

// sum + x, by the units that multiply: those that add have the clamping to do (a sixth less time on a Zen 5).
inline Doubles sum_by_multiplying(Doubles sum, Doubles x) {
#if DPK_HAVE_X86_VARIANTS && DPK_LANES == 16
  Doubles one = Doubles{} + 1.0;
  asm("" : "+v"(one));
  return x * one + sum;
#else
  return sum + x;
#endif
}

// Samples are far apart, so the columns of the next call are fetched meanwhile.
template <int rows, int vectors>
void clamp_products_of(const float* a, int64_t a_stride, const float* g, int64_t g_stride, const int64_t* samples,
                       int64_t count, double limit, double* out, int64_t out_stride) {
  Doubles sum[rows][vectors] = {};
  const Doubles limits = Doubles{} + limit;
  for (int64_t b = 0; b < count; ++b) {
    const float *inputs = a + samples[b] * a_stride, *outputs = g + samples[b] * g_stride;
    Doubles input[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      input[v] = widen(inputs + v * double_lanes);
      __builtin_prefetch(inputs + (vectors + v) * double_lanes);
    }
#pragma GCC unroll 5
    for (int m = 0; m < rows; ++m) {
      const double output = static_cast<double>(outputs[m]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        sum[m][v] = sum_by_multiplying(sum[m][v], clamped(input[v] * output, limits));
      }
    }
  }
#pragma GCC unroll 5
  for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      double* to = out + m * out_stride + v * double_lanes;
      store(to, load<Doubles>(to) + sum[m][v]);
    }
  }
}

template <int rows>
void clamp_rows_of(const float* a, int64_t a_stride, const float* g, int64_t g_stride, const int64_t* samples,
                   int64_t count, int64_t width, double limit, double* out, int64_t out_stride) {
  constexpr int step = clamp_vectors * double_lanes;
  int64_t j = 0;
  for (; j + step <= width; j += step) {
    clamp_products_of<rows, clamp_vectors>(a + j, a_stride, g, g_stride, samples, count, limit, out + j, out_stride);
  }
  for (; j + double_lanes <= width; j += double_lanes) {
    clamp_products_of<rows, 1>(a + j, a_stride, g, g_stride, samples, count, limit, out + j, out_stride);
  }
  for (; j < width; ++j) {
    for (int m = 0; m < rows; ++m) {
      double sum = 0.0;
      for (int64_t b = 0; b < count; ++b) {
        const double input = a[samples[b] * a_stride + j], output = g[samples[b] * g_stride + m];
        sum += clamped(output * input, limit);
      }
      out[m * out_stride + j] += sum;
    }
  }
}

void clamp_products(const float* a, int64_t a_stride, const float* g, int64_t g_stride, const int64_t* samples,
                    int64_t count, int64_t height, int64_t width, double limit, double* out, int64_t out_stride) {
  constexpr decltype(&clamp_rows_of<1>) of_rows[clamp_rows] = {clamp_rows_of<1>, clamp_rows_of<2>, clamp_rows_of<3>,
                                                               clamp_rows_of<4>, clamp_rows_of<5>};
  const int64_t blocks = (height + clamp_rows - 1) / clamp_rows;  // about as high as one another
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = height * i / blocks, rows = height * (i + 1) / blocks - first;
    of_rows[rows - 1](a, a_stride, g + first, g_stride, samples, count, width, limit, out + first * out_stride,
                      out_stride);
  }
}

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

// An 8 x 8 transpose by pairs, then quarters, then halves.
inline void transpose_eight(Eight (&r)[8]) {
  Eight a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = __builtin_shuffle(r[2 * i], r[2 * i + 1], (EightInts){0, 8, 2, 10, 4, 12, 6, 14});
    a[2 * i + 1] = __builtin_shuffle(r[2 * i], r[2 * i + 1], (EightInts){1, 9, 3, 11, 5, 13, 7, 15});
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      b[4 * i + k] = __builtin_shuffle(a[4 * i + k], a[4 * i + k + 2], (EightInts){0, 1, 8, 9, 4, 5, 12, 13});
      b[4 * i + k + 2] = __builtin_shuffle(a[4 * i + k], a[4 * i + k + 2], (EightInts){2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    r[k] = __builtin_shuffle(b[k], b[k + 4], (EightInts){0, 1, 2, 3, 8, 9, 10, 11});
    r[k + 4] = __builtin_shuffle(b[k], b[k + 4], (EightInts){4, 5, 6, 7, 12, 13, 14, 15});
  }
}

void interleave(const float* in, int64_t in_stride, int rows, int64_t places, float* out, int64_t width) {
  if (rows == 1 && width == 1) {
    __builtin_memcpy(out, in, static_cast<size_t>(places) * sizeof(float));
    return;
  }
  int m = 0;
  for (; m + 8 <= rows; m += 8) {
    int64_t p = 0;
    for (; places >= 8 && p < places; p += 8) {
      p = p + 8 <= places ? p : places - 8;  // the last eight may be some of those before, once more
      Eight r[8];
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) r[k] = load<Eight>(in + (m + k) * in_stride + p);
      transpose_eight(r);
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) store(out + (p + k) * width + m, r[k]);
    }
    for (; p < places; ++p) {
      for (int k = 0; k < 8; ++k) out[p * width + m + k] = in[(m + k) * in_stride + p];
    }
  }
  for (; m < rows; ++m) {
    for (int64_t p = 0; p < places; ++p) out[p * width + m] = in[m * in_stride + p];
  }
  for (; m < width; ++m) {
    for (int64_t p = 0; p < places; ++p) out[p * width + m] = 0.0f;
  }
}

constexpr WeightRowKernels table = {block, lanes, product, pack, finish, add, clamp_add, clamp_products, interleave};

}  // namespace weight_rows
}  // namespace dpk::DPK_ISA
