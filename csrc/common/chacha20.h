// ChaCha20 (RFC 8439), the generator behind secure noise.
//
//   words[16] = chacha20(key, counter),   counter = (block, purpose, release)
//
// state words 4-11   the key
// state word 12      low 32 bits of the block number (the RFC's block counter)
// state word 13      bits 0-23: high bits of the block number; bits 24-31: purpose   (13-15 are the RFC's nonce)
// state words 14, 15 low and high half of the release number
//
// Element e of a release belongs to block (e / 64) * 8 + e % 8 and takes its words from 4 * (e % 64 / 16) on, see
// normal64.h: eight blocks serve 64 consecutive elements.
//
// Torch-free; shared by CPU and CUDA.
#pragma once
#include "philox.h"

namespace dpk {

struct SecureStream {
  uint32_t key[8];
  uint64_t release;
};

// From four signed words of key.
inline SecureStream secure_stream(const int64_t* key, int64_t release) {
  SecureStream stream{{}, static_cast<uint64_t>(release)};
  for (int w = 0; w < 8; ++w) stream.key[w] = static_cast<uint32_t>(static_cast<uint64_t>(key[w / 2]) >> (w % 2 * 32));
  return stream;
}

constexpr int chacha20_double_rounds = 10, chacha20_words = 16;
constexpr int64_t secure_group_blocks = 8;

// One quarter round, on words or on vectors of words.
template <class W>
DPK_HOST_DEVICE inline void chacha20_quarter(W& a, W& b, W& c, W& d) {
  a += b, d ^= a, d = (d << 16) | (d >> 16);
  c += d, b ^= c, b = (b << 12) | (b >> 20);
  a += b, d ^= a, d = (d << 8) | (d >> 24);
  c += d, b ^= c, b = (b << 7) | (b >> 25);
}

// Ten double rounds and the final addition; `state` becomes the block's words.
template <class W>
DPK_HOST_DEVICE inline void chacha20_rounds(W* state) {
  W x[chacha20_words];
  for (int w = 0; w < chacha20_words; ++w) x[w] = state[w];
  for (int round = 0; round < chacha20_double_rounds; ++round) {
    for (int i = 0; i < 4; ++i) chacha20_quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
    for (int i = 0; i < 4; ++i) chacha20_quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
  }
  for (int w = 0; w < chacha20_words; ++w) state[w] += x[w];
}

// State word w of a block before the rounds.
DPK_HOST_DEVICE inline uint32_t chacha20_state_word(const SecureStream& stream, Purpose purpose, uint64_t block,
                                                    int w) {
  const uint32_t constants[4] = {0x61707865u, 0x3320646Eu, 0x79622D32u, 0x6B206574u};
  if (w < 4) return constants[w];
  if (w < 12) return stream.key[w - 4];
  if (w == 12) return static_cast<uint32_t>(block);
  if (w == 13) return counter_word_1(purpose, block);
  return static_cast<uint32_t>(w == 14 ? stream.release : stream.release >> 32);
}

struct ChaChaWords {
  uint32_t word[chacha20_words];
};

DPK_HOST_DEVICE inline ChaChaWords chacha20(const SecureStream& stream, Purpose purpose, uint64_t block) {
  ChaChaWords state;
  for (int w = 0; w < chacha20_words; ++w) state.word[w] = chacha20_state_word(stream, purpose, block, w);
  chacha20_rounds(state.word);
  return state;
}

}  // namespace dpk
