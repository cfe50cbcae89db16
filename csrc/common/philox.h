// Philox4x32-10, the counter-based generator behind every random number of the library.
//
//   words[4] = philox(key, counter),   counter = (block, purpose, release)
//
// counter word 0      low 32 bits of the block number
// counter word 1      bits 0-23: high bits of the block number; bits 24-31: purpose
// counter words 2, 3  low and high half of the release number
//
// So no two releases, and no two purposes, ever share a counter. Element e of a release belongs to
// block (e / 64) * 16 + e % 16 and takes word (e % 64) / 16 of it: sixteen blocks serve 64 consecutive
// elements, and vector code of any width up to sixteen lanes stores without a shuffle.
//
// Torch-free; shared by CPU and CUDA.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define DPK_HOST_DEVICE __host__ __device__
#else
#define DPK_HOST_DEVICE
#endif

namespace dpk {

enum class Purpose : uint32_t { noise = 1, radius_tail = 2, mask = 3 };

struct Stream {
  uint64_t key;
  uint64_t release;
};

constexpr uint32_t philox_multiplier_0 = 0xD2511F53u, philox_multiplier_1 = 0xCD9E8D57u;
constexpr uint32_t philox_weyl_0 = 0x9E3779B9u, philox_weyl_1 = 0xBB67AE85u;
constexpr int philox_rounds = 10;
constexpr int64_t group_elements = 64, group_blocks = 16;

struct PhiloxWords {
  uint32_t word[4];
};

DPK_HOST_DEVICE inline uint32_t counter_word_1(Purpose purpose, uint64_t block) {
  return static_cast<uint32_t>(block >> 32) | static_cast<uint32_t>(purpose) << 24;
}

DPK_HOST_DEVICE inline PhiloxWords philox(Stream stream, Purpose purpose, uint64_t block) {
  uint32_t x0 = static_cast<uint32_t>(block), x1 = counter_word_1(purpose, block);
  uint32_t x2 = static_cast<uint32_t>(stream.release), x3 = static_cast<uint32_t>(stream.release >> 32);
  uint32_t k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
  for (int round = 0; round < philox_rounds; ++round) {
    const uint64_t p0 = uint64_t{philox_multiplier_0} * x0, p1 = uint64_t{philox_multiplier_1} * x2;
    x0 = static_cast<uint32_t>(p1 >> 32) ^ x1 ^ k0;
    x1 = static_cast<uint32_t>(p1);
    x2 = static_cast<uint32_t>(p0 >> 32) ^ x3 ^ k1;
    x3 = static_cast<uint32_t>(p0);
    k0 += philox_weyl_0;
    k1 += philox_weyl_1;
  }
  return {{x0, x1, x2, x3}};
}

}  // namespace dpk
