// The vector code behind normals.h.
namespace dpk::DPK_ISA {
namespace random {

#include "simd.h"

struct VectorLanes {
  using F = Floats;
  using I = Ints;
  using U = Words;
  static F to_float(I x) { return __builtin_convertvector(x, F); }
  static I as_int(F x) { return (I)x; }
  static F as_float(I x) { return (F)x; }
  static F sqrt(F x) { return square_root(x); }
  static F select(I mask, F yes, F no) { return mask ? yes : no; }
};

struct ScalarLane {
  using F = float;
  using I = int32_t;
  using U = uint32_t;
  static F to_float(I x) { return static_cast<F>(x); }
  static I as_int(F x) {
    I bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static F as_float(I bits) {
    F x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
  static F sqrt(F x) { return __builtin_sqrtf(x); }
  static F select(bool mask, F yes, F no) { return mask ? yes : no; }
};

#include "../common/normal.h"

// What is the same for all blocks of a run: round keys, and the parts of the first three rounds that do not
// depend on the low half of the block number, the one counter word that changes within a run.
struct Schedule {
  Longs key[philox_rounds][2];
  Longs round_1_word_2, round_2_word_0, round_2_word_2, round_3_word_2, step[2];

  Schedule(Stream stream, Purpose purpose, uint64_t first_block) {
    uint32_t k0[philox_rounds], k1[philox_rounds];
    for (int round = 0; round < philox_rounds; ++round) {
      k0[round] = static_cast<uint32_t>(stream.key) + static_cast<uint32_t>(round) * philox_weyl_0;
      k1[round] = static_cast<uint32_t>(stream.key >> 32) + static_cast<uint32_t>(round) * philox_weyl_1;
      key[round][0] = Longs{} + uint64_t{k0[round]};
      key[round][1] = Longs{} + uint64_t{k1[round]};
    }
    const uint64_t p1 = uint64_t{philox_multiplier_1} * static_cast<uint32_t>(stream.release);
    const uint32_t x0 = static_cast<uint32_t>(p1 >> 32) ^ counter_word_1(purpose, first_block) ^ k0[0];
    const uint64_t p0 = uint64_t{philox_multiplier_0} * x0;
    round_1_word_2 = Longs{} + uint64_t{static_cast<uint32_t>(stream.release >> 32) ^ k1[0]};
    round_2_word_0 = Longs{} + uint64_t{static_cast<uint32_t>(p1) ^ k0[1]};
    round_2_word_2 = Longs{} + uint64_t{static_cast<uint32_t>(p0 >> 32) ^ k1[1]};
    round_3_word_2 = Longs{} + uint64_t{static_cast<uint32_t>(p0) ^ k1[2]};
    for (int l = 0; l < lanes; ++l) step[l % 2][l / 2] = static_cast<uint64_t>(l);
  }
};

// The words of a few groups at a time. Generator and transform take turns: each loop alone keeps the pipelines full.
constexpr int64_t turn_groups = 8, turn_blocks = turn_groups * group_blocks;

struct TurnWords {
  alignas(64) uint32_t word[4][turn_blocks];  // word w of each block
};

// Words of blocks first_block .. first_block + 2 * lanes, into out at `at`. Even and odd blocks are computed in
// separate sets of 64-bit lanes, so that a round is two products, two shifts and four xors; four such sets go in
// step, because a round waits on the one before it.
inline void philox_blocks(const Schedule& schedule, uint64_t first_block, TurnWords& out, int64_t at) {
  const Longs m0 = Longs{} + uint64_t{philox_multiplier_0}, m1 = Longs{} + uint64_t{philox_multiplier_1};
  constexpr int sets = 4;
  Longs x[sets][4];
#pragma GCC unroll 4
  for (int set = 0; set < sets; ++set) {
    const Longs block = schedule.step[set % 2] + (first_block + static_cast<uint64_t>(set / 2 * lanes));
    const Longs round_1 = multiply_low_halves(block, m0);
    const Longs round_2 = multiply_low_halves((round_1 >> 32) ^ schedule.round_1_word_2, m1);
    const Longs x0 = (round_2 >> 32) ^ schedule.round_2_word_0, x2 = round_1 ^ schedule.round_2_word_2;
    const Longs p0 = multiply_low_halves(x0, m0), p1 = multiply_low_halves(x2, m1);
    x[set][0] = (p1 >> 32) ^ round_2 ^ schedule.key[2][0];
    x[set][1] = p1;
    x[set][2] = (p0 >> 32) ^ schedule.round_3_word_2;
    x[set][3] = p0;
  }
#pragma GCC unroll 10
  for (int round = 3; round < philox_rounds; ++round) {
#pragma GCC unroll 4
    for (int set = 0; set < sets; ++set) {
      const Longs p0 = multiply_low_halves(x[set][0], m0), p1 = multiply_low_halves(x[set][2], m1);
      x[set][0] = (p1 >> 32) ^ x[set][1] ^ schedule.key[round][0];
      x[set][1] = p1;
      x[set][2] = (p0 >> 32) ^ x[set][3] ^ schedule.key[round][1];
      x[set][3] = p0;
    }
  }
  for (int w = 0; w < 4; ++w) {
    for (int set = 0; set < sets; set += 2) {
      store(&out.word[w][at + set / 2 * lanes], (x[set][w] & 0xFFFFFFFFull) | (x[set + 1][w] << 32));
    }
  }
}

// Calls use(words, offset, count, group) for groups `group` .. `group + count`, `offset` groups behind the first.
template <class Use>
inline void in_turns(Stream stream, Purpose purpose, uint64_t first_group, int64_t groups, const Use& use) {
  constexpr uint64_t run_groups = (uint64_t{1} << 32) / group_blocks;
  TurnWords words;
  int64_t done = 0;
  while (done < groups) {
    uint64_t group = first_group + static_cast<uint64_t>(done);
    const Schedule schedule(stream, purpose, group * group_blocks);
    const uint64_t run_end = (group / run_groups + 1) * run_groups;
    while (done < groups && group < run_end) {
      int64_t count = groups - done < turn_groups ? groups - done : turn_groups;
      if (run_end - group < static_cast<uint64_t>(count)) count = static_cast<int64_t>(run_end - group);
      for (int64_t at = 0; at < count * group_blocks; at += 2 * lanes) {
        philox_blocks(schedule, group * group_blocks + static_cast<uint64_t>(at), words, at);
      }
      use(words, done, count, group);
      done += count;
      group += static_cast<uint64_t>(count);
    }
  }
}

// Replaces the normals whose radius word is below tail_threshold; called about once in 130 groups.
__attribute__((noinline)) void patch_tail(float* out, const TurnWords& words, int64_t at, uint64_t group,
                                          Stream stream) {
  for (int64_t j = 0; j < group_blocks; ++j) {
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t word = words.word[2 * pair][at + j];
      if (word >= tail_threshold) continue;
      const auto extra = philox(stream, Purpose::radius_tail, group * group_blocks + static_cast<uint64_t>(j));
      const float radius = radius_from_uniform<ScalarLane>(tail_uniform(word, extra.word[pair]));
      normal_pair<ScalarLane>(radius, words.word[2 * pair + 1][at + j], out[32 * pair + j], out[32 * pair + 16 + j]);
    }
  }
}

void normals(float* out, int64_t groups, uint64_t first_group, Stream stream) {
  in_turns(stream, Purpose::noise, first_group, groups,
           [=](const TurnWords& words, int64_t offset, int64_t count, uint64_t group) {
             for (int64_t g = 0; g < count; ++g) {
               float* to = out + (offset + g) * group_elements;
               Words least = ~Words{};  // lane by lane, to see whether any radius word needs its tail
               for (int64_t j = 0; j < group_blocks; j += lanes) {
#pragma GCC unroll 2
                 for (int pair = 0; pair < 2; ++pair) {
                   const Words radius_word = load<Words>(&words.word[2 * pair][g * group_blocks + j]);
                   const Words angle_word = load<Words>(&words.word[2 * pair + 1][g * group_blocks + j]);
                   least = radius_word < least ? radius_word : least;
                   const Floats radius = radius_from_uniform<VectorLanes>(uniform_from_word<VectorLanes>(radius_word));
                   Floats z0, z1;
                   normal_pair<VectorLanes>(radius, angle_word, z0, z1);
                   store(to + 32 * pair + j, z0);
                   store(to + 32 * pair + 16 + j, z1);
                 }
               }
               if (__builtin_expect(sign_bits((Ints)(least < tail_threshold)) != 0, 0)) {
                 patch_tail(to, words, g * group_blocks, group + static_cast<uint64_t>(g), stream);
               }
             }
           });
}

void mask(uint64_t* bits, int64_t groups, uint64_t first_group, Stream stream, uint32_t threshold) {
  in_turns(stream, Purpose::mask, first_group, groups,
           [=](const TurnWords& words, int64_t offset, int64_t count, uint64_t) {
             for (int64_t g = 0; g < count; ++g) {
               uint64_t kept = 0;
               for (int w = 0; w < 4; ++w) {
                 for (int64_t j = 0; j < group_blocks; j += lanes) {
                   const Words word = load<Words>(&words.word[w][g * group_blocks + j]);
                   kept |= static_cast<uint64_t>(sign_bits((Ints)(word < threshold))) << (16 * w + j);
                 }
               }
               bits[offset + g] = kept;
             }
           });
}

template <class X, class Out>
void add(Out* out, const X* x, const float* z, int64_t n, double std, double scale) {
  int64_t i = 0;
  for (; i + double_lanes <= n; i += double_lanes) narrow(out + i, (widen(x + i) + widen(z + i) * std) * scale);
  for (; i < n; ++i) {
    out[i] = static_cast<Out>((static_cast<double>(x[i]) + std * static_cast<double>(z[i])) * scale);
  }
}

constexpr RandomKernels table = {normals, mask, add<float, float>, add<double, double>, add<double, float>};

}  // namespace random
}  // namespace dpk::DPK_ISA
