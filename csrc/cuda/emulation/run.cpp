// Runs a kernel under the emulation: run OP IN OUT. Files have arrays one after the other, each as its number of bytes
// (int64) and those bytes; tests/test_cuda.py knows which. Built by the tests, not shipped.
#include <algorithm>
#include <fstream>
#include <map>
#include <string>

#include "../noise.h"
#include "../sparsify.h"
#include "../sums.h"

namespace {

using namespace dpk;
using namespace dpk::cuda;

struct Array {
  std::vector<char> bytes;
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(bytes.data());
  }
  template <class T>
  int64_t count() const {
    return static_cast<int64_t>(bytes.size() / sizeof(T));
  }
};

using Arrays = std::vector<Array>;

Arrays read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  Arrays found;
  for (int64_t size; file.read(reinterpret_cast<char*>(&size), sizeof(size));) {
    found.push_back({std::vector<char>(static_cast<size_t>(size))});
    file.read(found.back().bytes.data(), size);
  }
  return found;
}

Array zeros(int64_t bytes) { return {std::vector<char>(static_cast<size_t>(bytes))}; }

// Tensors (float32, or float64 where `wide`) with the noise of stream and std, scaled.
Arrays noise(Arrays in) {
  auto *stream = in[0].as<int64_t>(), *wide = in[2].as<int64_t>();
  const double std = in[1].as<double>()[0], scale = in[1].as<double>()[1];
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (size_t i = 3; i < in.size(); ++i) {
    const int64_t length = wide[i - 3] ? in[i].count<double>() : in[i].count<float>();
    pieces.push_back({in[i].bytes.data(), total, length, wide[i - 3] != 0});
    total += length;
  }
  const int count = static_cast<int>(pieces.size());
  if (in[0].count<int64_t>() == 2) {
    const Stream plain{static_cast<uint64_t>(stream[0]), static_cast<uint64_t>(stream[1])};
    launch_noise(pieces.data(), count, total, plain, std, scale, 0);
  } else {
    const double step = std::ldexp(1.0, std::ilogb(std) - 30);
    launch_secure_noise(pieces.data(), count, total, secure_stream(stream, stream[4]), std, step, scale, 0);
  }
  return {in.begin() + 3, in.end()};
}

// indices and values of a float32 vector.
Arrays sparsify(Arrays in) {
  const int64_t size = in[2].count<float>();
  const MaskRule rule = mask_rule(in[0].as<int64_t>()[0], in[1].as<double>()[0]);
  std::vector<int64_t> counts(static_cast<size_t>(mask_blocks(size) + 1));
  launch_count(rule, size, counts.data(), 0);
  Array indices = zeros(counts.back() * 8), values = zeros(counts.back() * 4);
  launch_gather(in[2].as<float>(), rule, size, counts.data(), indices.as<int64_t>(), values.as<float>(), 0);
  return {indices, values};
}

// Partial squares [B, chunks], and weighted sums of all columns.
// sizes: B, groups; then for each column its length, kind and whether before has no samples; doubles: limit, weights.
Arrays sums(Arrays in) {
  auto* sizes = in[0].as<int64_t>();
  const int64_t samples = sizes[0], groups = sizes[1], count = (in[0].count<int64_t>() - 2) / 3;
  const bool difference = static_cast<int64_t>(in.size()) > 2 + count;
  std::vector<Rows> columns;
  std::vector<Chunk> chunks;
  int64_t total = 0;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t* column = sizes + 2 + 3 * c;
    const size_t at = static_cast<size_t>(2 + c);
    const void* before = difference ? in[at + static_cast<size_t>(count)].bytes.data() : nullptr;
    columns.push_back({in[at].bytes.data(), before, column[0], column[2] ? 0 : column[0], column[0], total,
                       static_cast<Kind>(column[1])});
    for (int64_t start = 0; start < column[0]; start += chunk_length) {
      chunks.push_back({static_cast<int>(c), start, std::min(chunk_length, column[0] - start)});
    }
    total += column[0];
  }
  Array partial = zeros(samples * static_cast<int64_t>(chunks.size()) * 8), out = zeros(total * 8);
  launch_squares(columns.data(), chunks.data(), static_cast<int64_t>(chunks.size()), samples, partial.as<double>(), 0);
  const double* numbers = in[1].as<double>();
  launch_sums(columns.data(), static_cast<int>(count), total, samples, numbers + 1, static_cast<int>(groups),
              numbers[0], out.as<double>(), 0);
  return {partial, out};
}

// Kernels that are wrong on purpose: the emulation and its sanitizers must notice.
DPK_KERNEL race(float* out) {
  DPK_SHARED float shared[64];
  shared[threadIdx.x] = 1.0f;
  out[threadIdx.x] = shared[(threadIdx.x + 1) % 64];  // no barrier in between
}
DPK_KERNEL beyond(float* out) { out[threadIdx.x + 1] = 1.0f; }
DPK_KERNEL divergent(float* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFu, 1.0f, 1);
  if (threadIdx.x < 16) __syncwarp();
}
DPK_KERNEL unwritten(float* out) {
  DPK_DYNAMIC_SHARED(float, shared);
  out[threadIdx.x] = shared[threadIdx.x];
}

template <void (*kernel)(float*)>
Arrays broken(Arrays in) {
  DPK_LAUNCH(kernel, 1, 64, 256, 0, in[0].as<float>());
  return in;
}

const std::map<std::string, Arrays (*)(Arrays)> ops = {
    {"noise", noise},
    {"sparsify", sparsify},
    {"sums", sums},
    {"race", broken<race>},
    {"beyond", broken<beyond>},
    {"divergent", broken<divergent>},
    {"unwritten", broken<unwritten>},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 || ops.find(argv[1]) == ops.end()) return 2;
  std::ofstream file(argv[3], std::ios::binary);
  for (const Array& array : ops.at(argv[1])(read(argv[2]))) {
    const auto size = static_cast<int64_t>(array.bytes.size());
    file.write(reinterpret_cast<const char*>(&size), sizeof(size)).write(array.bytes.data(), size);
  }
}
