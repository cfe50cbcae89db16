// Noise added to stretches of a release, on a GPU.
//
//   out[i] = (x[i] + std * z of element first + i) * scale        over a table of pieces, one launch for all of them
//
// x in float32 or float64; arithmetic in float64, rounded once. z is that of csrc/common (philox.h, normal.h), or for
// secure noise of chacha20.h and normal64.h, on its lattice: the same on every device, to the rounding of fused
// multiply-adds. A thread draws one block of the generator, which serves 4 elements of a group of 64 (of a secure
// release, 8): 16 (8) neighbouring threads write runs of 16 (8) elements. Tiling: a block of 256 threads takes 16 (32)
// groups. Limiter: for Philox, reading and writing x on A100 and later; for ChaCha20, integer arithmetic.
#pragma once
#include <cmath>
#include <cstring>

#include "../common/chacha20.h"
#include "device.h"

namespace dpk::cuda {

#include "../common/normal.h"
#include "../common/normal64.h"

// One lane of the vector code.
struct Scalar {
  using F = float;
  using I = int32_t;
  using U = uint32_t;
  using D = double;
  using Q = uint64_t;
  DPK_HOST_DEVICE static float to_float(int32_t x) { return static_cast<float>(x); }
  DPK_HOST_DEVICE static int32_t as_int(float x) { return as<int32_t>(x); }
  DPK_HOST_DEVICE static float as_float(int32_t x) { return as<float>(x); }
  DPK_HOST_DEVICE static uint64_t as_int(double x) { return as<uint64_t>(x); }
  DPK_HOST_DEVICE static double as_double(uint64_t x) { return as<double>(x); }
  DPK_HOST_DEVICE static float sqrt(float x) { return ::sqrtf(x); }
  DPK_HOST_DEVICE static double sqrt(double x) { return ::sqrt(x); }
  template <class To, class From>
  DPK_HOST_DEVICE static To as(From x) {
    To value;
    memcpy(&value, &x, sizeof(value));
    return value;
  }
  template <class T>
  DPK_HOST_DEVICE static T select(bool which, T a, T b) {
    return which ? a : b;
  }
  DPK_HOST_DEVICE static bool is_negative(uint64_t x) { return (x >> 63) != 0; }
};

// The four normals of a Philox block: elements lane, lane + 16, + 32, + 48 of its group.
DPK_DEVICE void philox_normals(Stream stream, uint64_t block, float (&z)[4]) {
  const PhiloxWords words = philox(stream, Purpose::noise, block);
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t word = words.word[2 * pair];
    float uniform = uniform_from_word<Scalar>(word);
    if (word < tail_threshold) {
      uniform = tail_uniform(word, philox(stream, Purpose::radius_tail, block).word[pair]);
    }
    normal_pair<Scalar>(radius_from_uniform<Scalar>(uniform), words.word[2 * pair + 1], z[2 * pair], z[2 * pair + 1]);
  }
}

// The eight normals of a ChaCha20 block: elements lane + 8 * i of its group.
DPK_DEVICE void chacha20_normals(const SecureStream& stream, uint64_t block, double (&z)[8]) {
  const ChaChaWords words = chacha20(stream, Purpose::noise, block);
  for (int pair = 0; pair < 4; ++pair) {
    const auto long_word = [pair](const ChaChaWords& from, int which) {
      const int at = 4 * pair + 2 * which;
      return static_cast<uint64_t>(from.word[at + 1]) << 32 | from.word[at];
    };
    const uint64_t word = long_word(words, 0);
    double radius = radius_from_word64<Scalar>(word);
    if (word < secure_tail_threshold) {
      radius = tail_radius64<Scalar>(word, long_word(chacha20(stream, Purpose::radius_tail, block), 0));
    }
    normal_pair64<Scalar>(radius, long_word(words, 1), z[2 * pair], z[2 * pair + 1]);
  }
}

// Both rounded to integers, added as such; `step` is a power of two.
DPK_DEVICE double on_lattice(double x, double noise, double step) {
  constexpr double limit = 0x1p51;
  double steps = x / step;
  steps = steps < limit ? steps : limit;  // also what is no number
  steps = steps > -limit ? steps : -limit;
  return static_cast<double>(static_cast<int64_t>(::rint(steps)) + static_cast<int64_t>(::rint(noise / step))) * step;
}

// Elements first .. first + length of a release, in memory.
struct Piece {
  void* data;
  int64_t first, length;
  bool wide;  // float64
};

constexpr int noise_threads = 256;

template <class Add>
DPK_DEVICE void add_to(const Piece* pieces, int count, int64_t element, int64_t total, const Piece*& piece,
                       const Add& add) {
  if (element >= total) return;
  if (element < piece->first || element >= piece->first + piece->length)
    piece = pieces + entry_of(pieces, count, element);
  const int64_t i = element - piece->first;
  if (piece->wide) {
    auto* x = static_cast<double*>(piece->data) + i;
    *x = add(*x);
  } else {
    auto* x = static_cast<float*>(piece->data) + i;
    *x = static_cast<float>(add(static_cast<double>(*x)));
  }
}

DPK_KERNEL add_philox_noise(const Piece* pieces, int count, int64_t total, Stream stream, double std, double scale) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t first = block / group_blocks * group_elements + block % group_blocks;
  if (first >= total) return;
  float z[4];
  philox_normals(stream, static_cast<uint64_t>(block), z);
  const Piece* piece = pieces + entry_of(pieces, count, first);
  for (int w = 0; w < 4; ++w) {
    const double noise = std * static_cast<double>(z[w]);
    add_to(pieces, count, first + w * group_blocks, total, piece, [&](double x) { return (x + noise) * scale; });
  }
}

DPK_KERNEL add_chacha20_noise(const Piece* pieces, int count, int64_t total, SecureStream stream, double std,
                              double step, double scale) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t first = block / secure_group_blocks * group_elements + block % secure_group_blocks;
  if (first >= total) return;
  double z[8];
  chacha20_normals(stream, static_cast<uint64_t>(block), z);
  const Piece* piece = pieces + entry_of(pieces, count, first);
  for (int w = 0; w < 8; ++w) {
    const double noise = std * z[w];
    add_to(pieces, count, first + w * secure_group_blocks, total, piece,
           [&](double x) { return on_lattice(x, noise, step) * scale; });
  }
}

// `pieces` in the device's memory; total is the number of elements.
inline void launch_noise(const Piece* pieces, int count, int64_t total, Stream stream, double std, double scale,
                         DPK_STREAM queue) {
  const int64_t blocks = (total + group_elements - 1) / group_elements * group_blocks;
  const auto grid = static_cast<unsigned>((blocks + noise_threads - 1) / noise_threads);
  if (grid > 0) DPK_LAUNCH(add_philox_noise, grid, noise_threads, 0, queue, pieces, count, total, stream, std, scale);
}

inline void launch_secure_noise(const Piece* pieces, int count, int64_t total, const SecureStream& stream, double std,
                                double step, double scale, DPK_STREAM queue) {
  const int64_t blocks = (total + group_elements - 1) / group_elements * secure_group_blocks;
  const auto grid = static_cast<unsigned>((blocks + noise_threads - 1) / noise_threads);
  if (grid > 0) {
    DPK_LAUNCH(add_chacha20_noise, grid, noise_threads, 0, queue, pieces, count, total, stream, std, step, scale);
  }
}

}  // namespace dpk::cuda
