// The vector code behind secure_normals.h.
namespace dpk::DPK_ISA {
namespace secure {

#include "simd.h"

struct VectorLanes {
  using D = Doubles;
  using Q = Longs;
  static Q as_int(D x) { return (Q)x; }
  static D as_double(Q x) { return (D)x; }
  static D sqrt(D x) { return square_root(x); }
  static SignedLongs is_negative(Q x) { return (SignedLongs)x < 0; }
  static D select(SignedLongs mask, D yes, D no) { return mask ? yes : no; }
};

struct ScalarLane {
  using D = double;
  using Q = uint64_t;
  static Q as_int(D x) {
    Q bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static D as_double(Q bits) {
    D x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
  static D sqrt(D x) { return __builtin_sqrt(x); }
  static bool is_negative(Q x) { return static_cast<int64_t>(x) < 0; }
  static D select(bool mask, D yes, D no) { return mask ? yes : no; }
};

#include "../common/normal64.h"

constexpr int64_t turn_groups = 8, turn_blocks = turn_groups * secure_group_blocks;

struct TurnWords {
  alignas(64) uint32_t word[chacha20_words][turn_blocks];  // word w of each block
};

// Words of blocks first_block .. first_block + lanes, which do not cross a multiple of 2^32.
inline void chacha20_lanes(const SecureStream& stream, Purpose purpose, uint64_t first_block, TurnWords& out,
                           int64_t at) {
  Words state[chacha20_words];
#pragma GCC unroll 16
  for (int w = 0; w < chacha20_words; ++w) state[w] = Words{} + chacha20_state_word(stream, purpose, first_block, w);
  for (int l = 0; l < lanes; ++l) state[12][l] += static_cast<uint32_t>(l);
  chacha20_rounds(state);
#pragma GCC unroll 16
  for (int w = 0; w < chacha20_words; ++w) store(&out.word[w][at], state[w]);
}

// Calls use(words, offset, count, block) for blocks `block` .. `block + count`, `offset` blocks behind the first.
template <class Use>
inline void in_turns(const SecureStream& stream, Purpose purpose, uint64_t first_block, int64_t blocks,
                     const Use& use) {
  constexpr uint64_t run = uint64_t{1} << 32;
  TurnWords words;
  for (int64_t done = 0; done < blocks;) {
    const uint64_t block = first_block + static_cast<uint64_t>(done);
    const uint64_t left = run - block % run;
    int64_t count = blocks - done < turn_blocks ? blocks - done : turn_blocks;
    if (left < static_cast<uint64_t>(count)) count = static_cast<int64_t>(left);
    for (int64_t at = 0; at < count; at += lanes) {
      chacha20_lanes(stream, purpose, block + static_cast<uint64_t>(at), words, at);
    }
    use(words, done, count, block);
    done += count;
  }
}

void words(uint32_t* out, int64_t blocks, uint64_t first_block, const SecureStream& stream, Purpose purpose) {
  in_turns(stream, purpose, first_block, blocks, [=](const TurnWords& drawn, int64_t offset, int64_t count, uint64_t) {
    for (int64_t b = 0; b < count; ++b) {
      for (int w = 0; w < chacha20_words; ++w) out[(offset + b) * chacha20_words + w] = drawn.word[w][b];
    }
  });
}

inline uint64_t word_pair(const uint32_t (*word)[turn_blocks], int64_t at) {
  return word[0][at] | static_cast<uint64_t>(word[1][at]) << 32;
}

// Replaces the normals whose radius word is below secure_tail_threshold; called about once in 128 groups.
__attribute__((noinline)) void patch_tail(double* out, const TurnWords& drawn, int64_t at, uint64_t block,
                                          const SecureStream& stream) {
  for (int64_t j = 0; j < secure_group_blocks; ++j) {
    for (int pair = 0; pair < 4; ++pair) {
      const uint64_t word = word_pair(&drawn.word[4 * pair], at + j);
      if (word >= secure_tail_threshold) continue;
      const auto more = chacha20(stream, Purpose::radius_tail, block + static_cast<uint64_t>(j));
      const uint64_t extra = more.word[4 * pair] | static_cast<uint64_t>(more.word[4 * pair + 1]) << 32;
      normal_pair64<ScalarLane>(tail_radius64<ScalarLane>(word, extra), word_pair(&drawn.word[4 * pair + 2], at + j),
                                out[16 * pair + j], out[16 * pair + 8 + j]);
    }
  }
}

inline Longs load_pair(const uint32_t (*word)[turn_blocks], int64_t at) {
  return widen_words(load<HalfWords>(&word[0][at])) | widen_words(load<HalfWords>(&word[1][at])) << 32;
}

void normals(double* out, int64_t groups, uint64_t first_group, const SecureStream& stream) {
  in_turns(stream, Purpose::noise, first_group * secure_group_blocks, groups * secure_group_blocks,
           [=](const TurnWords& drawn, int64_t offset, int64_t count, uint64_t block) {
             for (int64_t at = 0; at < count; at += secure_group_blocks) {
               double* to = out + (offset + at) / secure_group_blocks * group_elements;
               SignedLongs low{};  // negative where a radius word needs its tail
               for (int64_t j = 0; j < secure_group_blocks; j += double_lanes) {
#pragma GCC unroll 4
                 for (int pair = 0; pair < 4; ++pair) {
                   const Longs radius_word = load_pair(&drawn.word[4 * pair], at + j);
                   low |= (SignedLongs)((radius_word >> 52) - 1);
                   Doubles z0, z1;
                   normal_pair64<VectorLanes>(radius_from_word64<VectorLanes>(radius_word),
                                              load_pair(&drawn.word[4 * pair + 2], at + j), z0, z1);
                   store(to + 16 * pair + j, z0);
                   store(to + 16 * pair + 8 + j, z1);
                 }
               }
               if (__builtin_expect(sign_bits((Ints)low) != 0, 0)) {
                 patch_tail(to, drawn, at, block + static_cast<uint64_t>(at), stream);
               }
             }
           });
}

// The nearest integer, for |x| <= 2^51.
template <class D>
inline D nearest(D x) {
  return (x + 0x1.8p52) - 0x1.8p52;
}

// (round(x / s) + round(std z / s)) * s * scale; NaN counts as the end of the range.
template <class D>
inline D on_lattice(D x, D z, const Lattice& lattice, double scale) {
  const D limit = D{} + 0x1p51;
  D steps = x * lattice.inverse;
  steps = steps < limit ? steps : limit;
  steps = steps > -limit ? steps : -limit;
  return (nearest(steps) + nearest(z * lattice.std_steps)) * lattice.step * scale;
}

template <class X, class Out>
void add(Out* out, const X* x, const double* z, int64_t n, const Lattice& lattice, double scale) {
  int64_t i = 0;
  for (; i + double_lanes <= n; i += double_lanes) {
    narrow(out + i, on_lattice(widen(x + i), load<Doubles>(z + i), lattice, scale));
  }
  for (; i < n; ++i) out[i] = static_cast<Out>(on_lattice<double>(x[i], z[i], lattice, scale));
}

constexpr SecureKernels table = {words, normals, add<float, float>, add<double, double>, add<double, float>};

}  // namespace secure
}  // namespace dpk::DPK_ISA
