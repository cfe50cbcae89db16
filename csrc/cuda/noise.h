// The noise of a release, on a GPU: standard normals of its elements, and how they are added.
//
// z is that of csrc/common (philox.h, normal.h), or for secure noise of chacha20.h and normal64.h, on its lattice: the
// same on every device, to the rounding of fused multiply-adds. A thread draws one block of the generator, which serves
// 4 elements of a group of 64 (of a secure release, 8): 16 (8) neighbouring threads have runs of 16 (8) elements.
// Adding is in float64. Limiter: integer arithmetic, about 55 operations an element for Philox, 200 for ChaCha20.
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

// The three kinds of noise a sum may end in. A thread draws `elements` of them at once, `apart` from one another, those
// of block number `block`.
struct NoNoise {
  static constexpr int elements = 4, apart = 16;
  DPK_DEVICE void draw(uint64_t, double (&z)[elements]) const {
    for (double& each : z) each = 0.0;
  }
  DPK_DEVICE double add(double x, double) const { return x; }
};

struct PhiloxNoise {
  static constexpr int elements = 4, apart = static_cast<int>(group_blocks);
  Stream stream;
  double std;
  DPK_DEVICE void draw(uint64_t block, double (&z)[elements]) const {
    float drawn[elements];
    philox_normals(stream, block, drawn);
    for (int w = 0; w < elements; ++w) z[w] = static_cast<double>(drawn[w]);
  }
  DPK_DEVICE double add(double x, double z) const { return x + std * z; }
};

struct ChaChaNoise {
  static constexpr int elements = 8, apart = static_cast<int>(secure_group_blocks);
  SecureStream stream;
  double std, step;
  DPK_DEVICE void draw(uint64_t block, double (&z)[elements]) const { chacha20_normals(stream, block, z); }
  DPK_DEVICE double add(double x, double z) const { return on_lattice(x, std * z, step); }
};

// The step of the lattice for noise of this size: 2^(floor(log2 std) - 30).
inline double lattice_step(double std) { return std::ldexp(1.0, std::ilogb(std) - 30); }

}  // namespace dpk::cuda
