// The vector code behind rows.h.
namespace dpk::DPK_ISA {
namespace rows {

#include "simd.h"

struct F32 {
  static constexpr int64_t bytes = 4;
  static Doubles widen(const char* p) { return widen_floats(load<HalfFloats>(p)); }
  static double widen_one(const char* p) { return load<float>(p); }
};

struct F64 {
  static constexpr int64_t bytes = 8;
  static Doubles widen(const char* p) { return load<Doubles>(p); }
  static double widen_one(const char* p) { return load<double>(p); }
};

struct BF16 {
  static constexpr int64_t bytes = 2;
  static Doubles widen(const char* p) {
    const HalfWords bits = widen_shorts(load<QuarterShorts>(p)) << 16;
    return widen_floats((HalfFloats)bits);
  }
  static double widen_one(const char* p) {
    const uint32_t bits = uint32_t{load<uint16_t>(p)} << 16;
    return load<float>(&bits);
  }
};

struct F16 {
  static constexpr int64_t bytes = 2;
  // Normal numbers and infinities by moving bits; subnormals as integers times 2^-24.
  static Doubles widen(const char* p) {
    const HalfWords half = widen_shorts(load<QuarterShorts>(p));
    const HalfWords magnitude = half & 0x7FFFu;
    const HalfInts special = magnitude >= 0x7C00u, subnormal = magnitude < 0x0400u;
    const HalfWords bits = (magnitude << 13) + (special ? HalfWords{} + (224u << 23) : HalfWords{} + (112u << 23));
    const HalfFloats small = __builtin_convertvector((HalfInts)magnitude, HalfFloats) * 0x1p-24f;
    const HalfFloats value = subnormal ? small : (HalfFloats)bits;
    return widen_floats((HalfFloats)((HalfWords)value | (half & 0x8000u) << 16));
  }
  static double widen_one(const char* p) {
    char vector[double_lanes * 2] = {};
    __builtin_memcpy(vector, p, 2);
    return widen(vector)[0];
  }
};

// V is Doubles, or double for what is left at the end.
template <Form form, class V>
inline void add_products(V a, V b, V* products) {
  if constexpr (form == Form::difference) {
    const V e = a - b;
    products[0] += e * e;
  } else if constexpr (form == Form::momentum) {
    const V e = a - b;
    products[0] += a * a;
    products[1] += b * b;
    products[2] += e * e;
    products[3] += e * b;
    products[4] += a * b;
  } else {
    products[0] += a * a;
  }
}

template <Form form, class V>
inline void add_value(V& total, V a, V b, const double* c) {
  if constexpr (form == Form::difference) {
    total += (a - b) * c[0];
  } else if constexpr (form == Form::momentum) {
    total += (a - b * c[1]) * c[0];
    total += b * c[2];
  } else if constexpr (form == Form::clamp) {
    const V high = V{} + c[0], low = V{} - c[0];
    const V capped = a > high ? high : a;
    total += capped < low ? low : capped;
  } else {
    total += a * c[0];
  }
}

// locality 0: for the last time, so that it need not stay in any cache.
template <class E, int64_t ahead, int locality>
inline void fetch_ahead(const char* row, int64_t i, int64_t elements) {
  for (int64_t at = 0; at < elements * E::bytes; at += 64)
    __builtin_prefetch(row + i * E::bytes + ahead + at, 0, locality);
}

template <Form form, class E>
void gram(const char* now, const char* before, int64_t n, double* products) {
  constexpr int m = products_of(form);
  constexpr int unroll = m == 1 ? 4 : 2;
  constexpr int64_t step = unroll * double_lanes, ahead = 8192;
  Doubles sum[unroll][m] = {};
  const auto take = [&](int64_t i, Doubles* to) {
    const Doubles a = E::widen(now + i * E::bytes);
    add_products<form>(a, has_before(form) ? E::widen(before + i * E::bytes) : a, to);
  };
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    fetch_ahead<E, ahead, 3>(now, i, step);
    if (has_before(form)) fetch_ahead<E, ahead, 3>(before, i, step);
#pragma GCC unroll 4
    for (int u = 0; u < unroll; ++u) take(i + u * double_lanes, sum[u]);
  }
  for (; i + double_lanes <= n; i += double_lanes) take(i, sum[0]);
  double rest[m] = {};
  for (; i < n; ++i) {
    const double a = E::widen_one(now + i * E::bytes);
    add_products<form>(a, has_before(form) ? E::widen_one(before + i * E::bytes) : a, rest);
  }
  for (int k = 0; k < m; ++k) {
    Doubles total = {};
    for (int u = 0; u < unroll; ++u) total += sum[u][k];
    products[k] = rest[k] + sum_of_lanes(total);
  }
}

template <Form form, class E>
inline void add_row(Doubles& total, const Row& row, int64_t i) {
  const Doubles a = E::widen(row.now + i * E::bytes);
  add_value<form>(total, a, has_before(form) ? E::widen(row.before + i * E::bytes) : a, row.coefficient);
}

// Each row has loads of its own in the code, for the hardware fetches ahead by the address of the load (a loop over
// rows here took half as long again).
template <Form form, class E, int count, int unroll, Fetch fetch>
inline void accumulate_rows(double* sum, int64_t n, const Row* given) {
  constexpr int64_t step = unroll * double_lanes;
  Row rows[count];
  for (int r = 0; r < count; ++r) rows[r] = given[r];
  const bool apart = has_before(form) && rows[0].before != rows[count - 1].before;  // not one for all samples
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    Doubles total[unroll];
    for (int u = 0; u < unroll; ++u) total[u] = load<Doubles>(sum + i + u * double_lanes);
#pragma GCC unroll 8
    for (int r = 0; r < count; ++r) {
      if constexpr (fetch == Fetch::last_time) {
        fetch_ahead<E, 2048, 0>(rows[r].now, i, step);
        if (apart) fetch_ahead<E, 2048, 0>(rows[r].before, i, step);
      } else if constexpr (fetch == Fetch::own) {
        fetch_ahead<E, 1024, 3>(rows[r].now, i, step);
        if (apart) fetch_ahead<E, 1024, 3>(rows[r].before, i, step);
      }
#pragma GCC unroll 8
      for (int u = 0; u < unroll; ++u) add_row<form, E>(total[u], rows[r], i + u * double_lanes);
    }
    for (int u = 0; u < unroll; ++u) store(sum + i + u * double_lanes, total[u]);
  }
  for (; i + double_lanes <= n; i += double_lanes) {
    Doubles total = load<Doubles>(sum + i);
    for (int r = 0; r < count; ++r) add_row<form, E>(total, rows[r], i);
    store(sum + i, total);
  }
  for (; i < n; ++i) {
    for (int r = 0; r < count; ++r) {
      const double a = E::widen_one(rows[r].now + i * E::bytes);
      add_value<form>(sum[i], a, has_before(form) ? E::widen_one(rows[r].before + i * E::bytes) : a,
                      rows[r].coefficient);
    }
  }
}

template <Form form, class E, Fetch fetch>
inline void accumulate_all(double* sum, int64_t n, const Row* rows, int row_count) {
  if constexpr (fetch != Fetch::last_time && !has_before(form)) {  // reads and writes the sum half as often
    for (; row_count >= 8; row_count -= 8, rows += 8) accumulate_rows<form, E, 8, 4, fetch>(sum, n, rows);
  }
  for (; row_count >= 4; row_count -= 4, rows += 4) accumulate_rows<form, E, 4, 8, fetch>(sum, n, rows);
  if (row_count == 3) return accumulate_rows<form, E, 3, 8, fetch>(sum, n, rows);
  if (row_count == 2) return accumulate_rows<form, E, 2, 8, fetch>(sum, n, rows);
  if (row_count == 1) return accumulate_rows<form, E, 1, 8, fetch>(sum, n, rows);
}

template <Form form, class E>
void accumulate(double* sum, int64_t n, const Row* rows, int row_count, Fetch fetch) {
  if (fetch == Fetch::last_time) return accumulate_all<form, E, Fetch::last_time>(sum, n, rows, row_count);
  if (fetch == Fetch::own) return accumulate_all<form, E, Fetch::own>(sum, n, rows, row_count);
  accumulate_all<form, E, Fetch::nothing>(sum, n, rows, row_count);
}

inline double difference(float* out, const float* a, const float* b, int64_t n, double scale, double other_scale) {
  constexpr int unroll = 4;
  Doubles sum[unroll] = {};
  const auto take = [&](int64_t i, Doubles& to) {
    const HalfFloats row = narrow_doubles(widen(a + i) * scale) - narrow_doubles(widen(b + i) * other_scale);
    store(out + i, row);
    const Doubles wide = widen_floats(row);
    to += wide * wide;
  };
  int64_t i = 0;
  for (; i + unroll * double_lanes <= n; i += unroll * double_lanes) {
#pragma GCC unroll 4
    for (int u = 0; u < unroll; ++u) take(i + u * double_lanes, sum[u]);
  }
  for (; i + double_lanes <= n; i += double_lanes) take(i, sum[0]);
  double rest = 0.0;
  for (; i < n; ++i) {
    out[i] = static_cast<float>(static_cast<double>(a[i]) * scale) -
             static_cast<float>(static_cast<double>(b[i]) * other_scale);
    rest += static_cast<double>(out[i]) * static_cast<double>(out[i]);
  }
  return rest + sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

#define DPK_FORM(kernel, form) {kernel<form, F32>, kernel<form, F64>, kernel<form, BF16>, kernel<form, F16>}
#define DPK_FORMS(kernel)                                                                                \
  {DPK_FORM(kernel, Form::single), DPK_FORM(kernel, Form::difference), DPK_FORM(kernel, Form::momentum), \
   DPK_FORM(kernel, Form::clamp)}
constexpr RowKernels table = {DPK_FORMS(gram), DPK_FORMS(accumulate), difference};
#undef DPK_FORM
#undef DPK_FORMS

}  // namespace rows
}  // namespace dpk::DPK_ISA
