// Each sample's own weight gradient, formed in float32, and its norm^2 while it is in cache.
//
//   linear:       row_b[i][j] = sum_t g[b][t][i] a[b][t][j]
//   convolution:  row_n[o][c][k] = sum_y g[n][o][y] x[n][c][y * stride + k * dilation - padding]     (1 to 3
//   dimensions)
//
// Both are products with the summed index outside: at each place (t, or y) an outer product of a few g's and a run of
// inputs is added to a tile of the row in registers. In a convolution with channels last, the inputs that meet one g
// along the innermost kernel dimension are one run in memory: patches are read where they are, never unfolded.
//
// Clamped sums take the tile of each sample of a run in turn, which one thread adds up in float64: rows are never
// stored.
//
// The row is what is stored, so its norm^2 is exact up to float64 rounding. Work is cut by shape alone, and norms are
// added in order: bits do not depend on the number of threads, nor on the other samples. Limit: multiply-add peak.
#pragma once
#include <cstdint>

namespace dpk {

constexpr int tile_vectors = 3;  // vectors of a run to a tile

// The places summed over, in three nested loops: `step` is how far the run moves, in floats; g's are consecutive.
struct Walk {
  int64_t count[3];
  int64_t step[3];
};

struct WeightRowKernels {
  int block;  // g's to a tile
  int lanes;  // floats to a vector
  // tile[m][0 .. width) = sum over places of g[place][m] * run[place][...], for m < rows; width up to tile_vectors.
  // g is packed in blocks: `block` floats to a place, whatever `rows` is. Reads and writes whole vectors, or half of
  // one where that is enough; adds to the tile if `onto`.
  void (*product)(const float* g, int rows, const float* run, int64_t width, const Walk& walk, float* tile,
                  int64_t tile_stride, bool onto);
  // to[line][j] = from[line][j] for j < width, zeros up to `to_width`; lines of `block` or of whole vectors are quick.
  void (*pack)(const float* from, int64_t from_stride, int64_t lines, int64_t width, float* to, int64_t to_stride,
               int64_t to_width);
  // Copies `rows` x `width` floats out, past the caches if asked to; returns the sum of their squares in float64.
  // `out` may be null.
  double (*finish)(const float* tile, int64_t stride, int rows, int64_t width, float* out, int64_t out_stride,
                   bool past_caches);
  // out += scale * tile, over `rows` x `width` floats.
  void (*add)(const float* tile, int64_t stride, int rows, int64_t width, float scale, float* out, int64_t out_stride);
  // out += tile clamped to [-limit, limit], NaN to the limit, over `rows` x `width` elements.
  void (*clamp_add)(const float* tile, int64_t stride, int rows, int64_t width, float limit, double* out,
                    int64_t out_stride);
  // out[i][j] += sum over these samples, which are finite, of g[sample][i] * a[sample][j], clamped, all in float64.
  void (*clamp_products)(const float* a, int64_t a_stride, const float* g, int64_t g_stride, const int64_t* samples,
                         int64_t count, int64_t height, int64_t width, double limit, double* out, int64_t out_stride);
  // out[place][m] = in[m][place] for m < rows, zeros up to `width`.
  void (*interleave)(const float* in, int64_t in_stride, int rows, int64_t places, float* out, int64_t width);
};

const WeightRowKernels& weight_row_kernels();

}  // namespace dpk
