// The noise of one release, as the ops are given it. Torch-free; shared by CPU and CUDA.
#pragma once
#include "chacha20.h"

namespace dpk {

struct Noise {
  bool on = false;
  Stream stream{};
  double std = 0.0;
  bool secure = false;
  SecureStream secure_stream{};  // instead of `stream`
};

}  // namespace dpk
