// The two leaf operations on dense rows that every clipped sum is made of, for a stretch of n columns:
//
//   gram:        products[k] = the k-th inner product of the form, of a row
//   accumulate:  sum[j] += sum over samples of value(row; coefficients)[j]
//
// form        products                                     value
// single      |a|^2                                        c0 a
// difference  |e|^2,  e = a - b                            c0 e
// momentum    |a|^2, |b|^2, |e|^2, <e,b>, <a,b>            c0 (a - c1 b) + c2 b,  c1 = 0 or 1
// clamp       |a|^2                                        min(max(a, -c0), c0)
//
// Inputs are float32, float64, bfloat16 or float16, widened in registers; differences are formed there too.
// Everything accumulates in float64: a product of two float32 is exact, so a norm^2 is right to about
// (n / vector width) * 2^-53. The sum takes samples one after the other, so it does not depend on how
// they are blocked. Limit: one read of each row from memory for gram, one from cache for accumulate.
//
// gram fetches 8 KiB ahead: across the borders of pages, where the hardware stops, and far enough that what is fetched
// when a block ends arrives while it is summed (2 KiB took a tenth longer for rows of 8k).
#pragma once
#include "../common/element.h"

namespace dpk {

enum class Form : int { single, difference, momentum, clamp };
constexpr int form_count = 4;
constexpr int max_products = 5;
constexpr int products_of(Form form) { return form == Form::momentum ? max_products : 1; }
constexpr bool has_before(Form form) { return form == Form::difference || form == Form::momentum; }

constexpr int64_t tile_elements = 2048;  // columns go to the kernels in tiles of this size

struct Row {
  const char* now;
  const char* before;
  double coefficient[3];
};

// How accumulate, the last to read a row, fetches it: from a near cache not at all. From a far one 2 KiB ahead and as
// read for the last time, so that it does not push out what is still to be summed (on a Zen 5, for rows beyond the
// second-level cache, the sum takes 0.6 reads instead of 0.9). On a Xeon that took three times as long: there in the
// `own` ordinary way.
enum class Fetch : int { nothing, last_time, own };

struct RowKernels {
  using Gram = void (*)(const char* now, const char* before, int64_t n, double* products);
  using Accumulate = void (*)(double* sum, int64_t n, const Row* rows, int row_count, Fetch fetch);
  Gram gram[form_count][element_count];
  Accumulate accumulate[form_count][element_count];
  // out = scale a - other_scale b, of n float32: each term rounded, so that equal ones leave nothing, and the
  // difference; returns the norm^2 of what is then there.
  double (*difference)(float* out, const float* a, const float* b, int64_t n, double scale, double other_scale);
};

const RowKernels& row_kernels();

// How rows that are in no cache of the thread's own are fetched.
Fetch fetch_from_afar();

}  // namespace dpk
