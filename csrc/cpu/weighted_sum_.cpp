// weighted_sum_: for each tensor of a list,
//
//   sum = (what it holds, if `filled` + sum over its rows and samples of weight_b row_b + std * z) * scale
//
// in float64, rounded once. Columns go in pieces: every sample's stretch of a piece is added while its sum is in cache,
// then the noise, so that rows are read once and sums are written once. Threads share pieces by the work in them, so
// small tensors go together. A sample of weight zero is left out by selection. Samples are added in order: bits do not
// depend on the number of threads. Limit: one read of the rows from memory.
#include <algorithm>

#include "arguments.h"
#include "parallel.h"

namespace dpk {
namespace {

constexpr int64_t rows_at_a_time = 4;  // streams from memory
constexpr int64_t piece_elements = 4 * tile_elements;

struct Target {
  char* data;
  bool wide, filled;
  int64_t first;  // element, over the whole list
  std::vector<SampleRows> sources;
};

struct Piece {
  size_t target;
  int64_t start, length;
};

}  // namespace

void weighted_sum_(Tensors sums, std::vector<bool> filled, const Tensors& rows, std::vector<int64_t> owner,
                   const Tensor& weights, const std::optional<Tensor>& stream, const std::optional<Tensor>& std,
                   double scale) {
  const int64_t batch = weights.size(0), groups = weights.size(1);
  const auto* weight = weights.const_data_ptr<double>();
  std::vector<Target> targets;
  std::vector<Piece> pieces;
  std::vector<size_t> shares;  // first pieces of equal shares of work
  int64_t first = 0, work = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    STD_TORCH_CHECK(sums[i].is_contiguous(), "dpkernels: sums must be contiguous");
    const Element element = element_of(sums[i]);
    STD_TORCH_CHECK(element == Element::f64 || element == Element::f32, "dpkernels: sums must be float32 or float64");
    const bool wide = element == Element::f64;
    targets.push_back({static_cast<char*>(sums[i].mutable_data_ptr()), wide, filled[i], first, {}});
    const int64_t size = sums[i].numel();
    for (int64_t start = 0; start < size; start += piece_elements) {
      const int64_t length = std::min(piece_elements, size - start);
      if (work + length > piece_elements || shares.empty()) {
        shares.push_back(pieces.size());
        work = 0;
      }
      work += length;
      pieces.push_back({i, start, length});
    }
    first += size;
  }
  Tensors keep;
  for (size_t j = 0; j < rows.size(); ++j) {
    targets[static_cast<size_t>(owner[j])].sources.push_back(sample_rows(rows[j], keep));
  }
  const Noise noise = noise_of(stream, std);
  const auto& accumulate = row_kernels().accumulate[static_cast<int>(Form::single)];
  const Fetch fetch = fetch_from_afar();
  const auto share_count = static_cast<int64_t>(shares.size());
  shares.push_back(pieces.size());
  const int64_t grain = (int64_t{1} << 15) / (piece_elements * std::max<int64_t>(batch, 1)) + 1;
  parallel_for(0, share_count, grain, [&](int64_t begin, int64_t end) {
    NoiseAdder adder(noise);
    alignas(64) double sum[piece_elements];
    for (size_t p = shares[static_cast<size_t>(begin)]; p < shares[static_cast<size_t>(end)]; ++p) {
      const Piece& piece = pieces[p];
      const Target& target = targets[piece.target];
      auto* wide = reinterpret_cast<double*>(target.data) + piece.start;
      auto* narrow = reinterpret_cast<float*>(target.data) + piece.start;
      const auto write = [&](auto* out, const auto* from) {
        adder.add(out, from, piece.length, target.first + piece.start, scale);
      };
      if (target.sources.empty() && target.filled) {
        target.wide ? write(wide, wide) : write(narrow, narrow);
        continue;
      }
      if (!target.filled) {
        std::fill_n(sum, piece.length, 0.0);
      } else if (target.wide) {
        std::copy_n(wide, piece.length, sum);
      } else {
        std::copy_n(narrow, piece.length, sum);
      }
      const auto group = groups > 1 ? static_cast<int64_t>(piece.target) : 0;
      for (const SampleRows& source : target.sources) {
        Row block[rows_at_a_time];
        int count = 0;
        for (int64_t b = 0; b < batch; ++b) {
          const double w = weight[b * groups + group];
          if (w != 0.0) block[count++] = {source.at(b, piece.start), nullptr, {w, 0.0, 0.0}};
          if (count == rows_at_a_time || (b + 1 == batch && count > 0)) {
            accumulate[static_cast<int>(source.element)](sum, piece.length, block, count, fetch);
            count = 0;
          }
        }
      }
      target.wide ? write(wide, sum) : write(narrow, sum);
    }
  });
}

}  // namespace dpk

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("weighted_sum_", TORCH_BOX(&dpk::weighted_sum_)); }
