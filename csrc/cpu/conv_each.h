// Convolution with each sample's own weights, and its gradient with respect to the images. float32. With fewer weights
// than images, each is that of a run of images, all equally long.
//
//   conv_each:        y[n][o][p] = sum_(c, k) w[n][o][c][k] x[n][c][p * stride + k * dilation - padding]
//   conv_each_input:  dx[n][c][q] = sum_(o, k) w[n][o][c][k] g[n][o][(q + padding - k * dilation) / stride], where
//   whole
//
// Both are the same sum over taps. An image is laid out in planes, one for each channel and each remainder of a place
// modulo the stride, with zeros around; then every tap (a channel and a place in the kernel) reads a run that starts at
// a fixed offset from the output's place, over whole lines: places are taken one after the other through the planes'
// lines, and the few that fall between lines are computed and dropped. Weights are packed, a block of outputs together.
//
// Bits do not depend on the number of threads, nor on the other samples. Limit: multiply-add peak.
#pragma once
#include <cstdint>

namespace dpk {

struct Tap {
  int64_t input, weight;  // offsets, in floats
};

struct ConvEachKernels {
  int block, lanes, vectors;  // outputs to a block, floats to a vector, vectors to a tile
  // out[m][j] = sum over taps of weights[tap.weight + m] * in[tap.input + j], for m < rows and j < vectors * lanes.
  void (*tapped)(const float* weights, int rows, const float* in, int vectors, const Tap* taps, int64_t count,
                 float* out, int64_t out_stride);
};

const ConvEachKernels& conv_each_kernels();

}  // namespace dpk
