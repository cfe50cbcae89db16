// The clipped, noised sum over samples: the one loop behind clip_sum, clip_difference_sum,
// clip_momentum_sum and clamp_sum.
//
//   products_i = gram of row i                       from memory
//   c_i        = rule(products_i)
//   out        = sum_i value(row_i; c_i) + std * z   from cache; noise as the sum is written
//
// Samples go in blocks that fit a cache: rows are read for their inner products, and then summed from cache, stretch of
// columns by stretch. (Fetching the next block while this one is summed, or reading it in turn with that, is slower but
// for one input in rows of about 100k, by a tenth faster: not worth a third kernel.) Two ways to share the work, chosen
// by shape alone so that the result is too:
//
//   by samples   rows of up to 1 MiB: up to 16 slots of samples, each with its own sum, added in order at the end.
//                Threads do not wait for one another
//   by columns   longer rows or few samples: threads share the columns of each block, which the threads' own caches
//   hold
//                or else the last-level one. Rows too long even for that are read from memory twice
//
// Inner products are taken over fixed tiles of columns and added in order; sums go sample after sample.
// So the bits do not depend on the number of threads.
//
// A row whose products are not all finite (a NaN, an Inf, or a float64 row whose norm^2 overflows) is left
// out by selection. Sums are float64 until the noise has been added, then rounded once.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "../common/clip_rules.h"
#include "normals.h"
#include "rows.h"

namespace dpk {

struct Column {  // one tensor of the list, flattened behind the sample dimension
  const char* now;
  const char* before;     // null unless the form has one
  int64_t now_stride;     // bytes from sample to sample
  int64_t before_stride;  // 0: the same for every sample
  void* out;
  int64_t length;
  Element element;
};

struct SumProblem {
  Form form;
  int64_t batch;
  std::vector<Column> columns;
  int groups;  // 1, or one per column: coefficients are then per group
  Noise noise;
  double* norms;  // [batch], before clipping
  // coefficients of one row in one group from the inner products of that group
  std::function<void(int group, const double* products, double* coefficient)> rule;
};

void blocked_sum(const SumProblem& problem);

// Tiles that a column of this length is cut into.
int64_t tiles_of(int64_t length);

}  // namespace dpk
