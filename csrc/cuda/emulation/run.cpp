// Runs a kernel under the emulation: run OP IN OUT. Files have arrays one after the other, each as its number of bytes
// (int64) and those bytes; tests/test_cuda.py knows which. Built by the tests, not shipped.
#include <algorithm>
#include <fstream>
#include <map>
#include <string>

#include "../lookup.h"
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

template <Form form>
void add_sums(const Tables& tables, const Weights& weights, Array& stream, double std, double scale) {
  const auto with = [&](const auto& noise) {
    launch_sums<form>(tables.targets.data(), static_cast<int>(tables.targets.size()), tables.total,
                      tables.sources.data(), weights, noise, scale, 0);
  };
  auto* words = stream.as<int64_t>();
  if (stream.count<int64_t>() == 0) {
    with(NoNoise{});
  } else if (stream.count<int64_t>() == 2) {
    with(PhiloxNoise{{static_cast<uint64_t>(words[0]), static_cast<uint64_t>(words[1])}, std});
  } else {
    with(ChaChaNoise{secure_stream(words, words[4]), std, lattice_step(std)});
  }
}

// weighted_sum_: sizes (samples, groups, targets; of each target whether wide, filled, and its number of sources; of
// each source its type), numbers (std, scale), stream, weights, sums, rows. Without samples, noise alone.
Arrays weighted(Arrays in) {
  const auto* sizes = in[0].as<int64_t>();
  const int64_t samples = sizes[0], count = sizes[2];
  const int64_t *of_target = sizes + 3, *of_source = of_target + 3 * count;
  Tables tables;
  Arrays out(in.begin() + 4, in.begin() + 4 + count);
  size_t next = 4 + static_cast<size_t>(count);
  for (int64_t i = 0; i < count; ++i, of_target += 3) {
    Array& sum = out[static_cast<size_t>(i)];
    const int64_t length = of_target[0] ? sum.count<double>() : sum.count<float>();
    tables.add_target(sum.bytes.data(), length, of_target[0] != 0, of_target[1] != 0);
    for (int64_t j = 0; j < of_target[2]; ++j) {
      tables.add_source({in[next++].bytes.data(), nullptr, length, 0, length, static_cast<Element>(*of_source++)});
    }
  }
  const double* numbers = in[1].as<double>();
  add_sums<Form::single>(tables, {in[3].as<double>(), samples, static_cast<int>(sizes[1]), -1.0}, in[2], numbers[0],
                         numbers[1]);
  return out;
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

// The clipped sums of lists of tensors: sizes (samples, groups, rule; of each tensor its length, type, and whether all
// samples have one `before`), numbers (stability, three bounds of momentum, limit, std, max_norms), stream, now,
// before. norms, coefficients, sums.
template <Form form>
Arrays clipped(Arrays in) {
  const auto* sizes = in[0].as<int64_t>();
  const int64_t samples = sizes[0], groups = sizes[1], count = in[0].count<int64_t>() / 3 - 1;
  const bool with_before = static_cast<int64_t>(in.size()) == 3 + 2 * count;
  Tables tables;
  Arrays out = {zeros(samples * 8), zeros(samples * groups * coefficient_count<form> * 8)};
  for (int64_t i = 0; i < count; ++i) {
    const bool wide = sizes[4 + 3 * i] == static_cast<int64_t>(Element::f64);
    out.push_back(zeros(sizes[3 + 3 * i] * (wide ? 8 : 4)));
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t *column = sizes + 3 + 3 * i, length = column[0];
    const auto element = static_cast<Element>(column[1]);
    const size_t at = static_cast<size_t>(3 + i);
    const void* before = with_before ? in[at + static_cast<size_t>(count)].bytes.data() : nullptr;
    tables.add_target(out[static_cast<size_t>(2 + i)].bytes.data(), length, element == Element::f64, false);
    tables.add_source({in[at].bytes.data(), before, length, column[2] ? 0 : length, length, element});
  }
  const double* numbers = in[1].as<double>();
  const RuleNumbers rule{static_cast<Rule>(sizes[2]), numbers[0], {numbers[1], numbers[2], numbers[3]}};
  const auto chunk_count = static_cast<int64_t>(tables.chunks.size());
  Array partial = zeros(samples * chunk_count * product_count<form> * 8);
  launch_products<form>(tables.sources.data(), tables.chunks.data(), chunk_count, samples, partial.as<double>(), 0);
  const auto ends = tables.ends(static_cast<int>(groups));
  launch_coefficients<form>(partial.as<double>(), ends.data(), static_cast<int>(groups), samples, rule, numbers + 6,
                            out[1].as<double>(), out[0].as<double>(), 0);
  const Weights weights{out[1].as<double>(), samples, static_cast<int>(groups), numbers[4]};
  add_sums<form>(tables, weights, in[2], numbers[5], 1.0);
  return out;
}

// Squares of rows that are lines added up by id: sizes (samples, lines, width), ids, lines in float32.
Arrays lookup(Arrays in) {
  const auto* sizes = in[0].as<int64_t>();
  const int64_t samples = sizes[0], length = sizes[1], blocks = lookup_blocks(length);
  Array next = zeros(samples * length * 8), partial = zeros(samples * blocks * 8), out = zeros(samples * 8);
  launch_lookup(in[1].as<int64_t>(), in[2].as<float>(), samples, length, sizes[2], next.as<int64_t>(),
                partial.as<double>(), 0);
  launch_coefficients<Form::single>(partial.as<double>(), &blocks, 1, samples, {Rule::squares, 0.0, {}}, nullptr,
                                    out.as<double>(), nullptr, 0);
  return {out};
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
    {"weighted", weighted},
    {"sparsify", sparsify},
    {"clipped", clipped<Form::single>},
    {"momentum", clipped<Form::momentum>},
    {"lookup", lookup},
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
