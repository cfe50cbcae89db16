#include "blocked_sum.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#if defined(__unix__)
#include <unistd.h>
#endif

#include "parallel.h"

namespace dpk {
namespace {

constexpr int min_block = 2, max_block = 32, few_rows = 4;
constexpr int64_t tiles_at_a_time = 8;  // that are summed: the sum over them stays in the second-level cache
constexpr int64_t max_slots = 16, samples_per_slot = 64;
constexpr int64_t long_row_bytes = int64_t{1} << 20;
constexpr int64_t grain_elements = 1 << 15;

// Each thread's own second-level cache. Blocks do not change the result.
int64_t cache_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  static const int64_t found = 0;
#endif
  return std::clamp<int64_t>(found > 0 ? found : 1 << 20, 1 << 18, 1 << 22);
}

// What so many threads may count on of the last-level cache, which others share: a virtual machine's system tells the
// size of all there is.
int64_t shared_cache_bytes(int64_t threads) {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const int64_t found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  static const int64_t found = 0;
#endif
  return std::min(found / 2, threads << 23);
}

struct Tile {
  int column;
  int group;
  int64_t start;  // within its column
  int64_t length;
  int64_t first;   // within the whole list
  int64_t sum_at;  // where its sum stands: like first, but each column starts on a cache line
};

// Memory for the sums. Fresh pages cost as much as a good part of the work, so a thread keeps up to 32 MiB of them
// for its next call.
class Scratch {
 public:
  explicit Scratch(int64_t doubles) {
    const size_t bytes = static_cast<size_t>(doubles) * sizeof(double);
    if (kept().bytes >= bytes) std::swap(mine_, kept());
    if (mine_.bytes < bytes) mine_ = {static_cast<double*>(::operator new(bytes, std::align_val_t{64})), bytes};
  }
  ~Scratch() {
    if (mine_.bytes <= (size_t{32} << 20) && mine_.bytes > kept().bytes) std::swap(mine_, kept());
  }
  double* data() const { return mine_.data; }

 private:
  struct Memory {
    double* data = nullptr;
    size_t bytes = 0;
    Memory() = default;
    Memory(double* d, size_t b) : data(d), bytes(b) {}
    Memory(Memory&& other) noexcept : data(std::exchange(other.data, nullptr)), bytes(std::exchange(other.bytes, 0)) {}
    Memory& operator=(Memory&& other) noexcept {
      std::swap(data, other.data);
      std::swap(bytes, other.bytes);
      return *this;
    }
    ~Memory() { ::operator delete(data, std::align_val_t{64}); }
  };
  static Memory& kept() {
    static thread_local Memory memory;
    return memory;
  }
  Memory mine_;
};

// Coefficients and norms of a block of rows, and which of them count.
struct Block {
  int64_t first = 0;
  int rows = 0;
  std::vector<double> products;     // [rows][groups][m]
  std::vector<double> coefficient;  // [rows][groups][3]
  std::vector<char> live;           // [rows]
};

class BlockedSum {
 public:
  explicit BlockedSum(const SumProblem& problem) : p_(problem), m_(products_of(problem.form)), kernels_(row_kernels()) {
    int64_t first = 0;
    for (size_t c = 0; c < p_.columns.size(); ++c) {
      const Column& column = p_.columns[c];
      row_bytes_ += column.length * element_bytes(column.element) * (has_before(p_.form) ? 2 : 1);
      for (int64_t start = 0; start < column.length; start += tile_elements) {
        const int64_t length = std::min(tile_elements, column.length - start);
        tiles_.push_back({static_cast<int>(c), p_.groups > 1 ? static_cast<int>(c) : 0, start, length, first + start,
                          sum_size_ + start});
      }
      first += column.length;
      sum_size_ += (column.length + 7) / 8 * 8;
    }
    width_ = first;
  }

  void run() {
    if (width_ == 0) return no_columns();
    const bool by_samples = row_bytes_ <= long_row_bytes && p_.batch >= 2 * samples_per_slot;
    slots_ = by_samples ? std::min(max_slots, p_.batch / samples_per_slot) : 1;
    const Scratch scratch(slots_ * sum_size_);
    sum_ = scratch.data();
    by_samples ? sum_by_samples() : sum_by_columns();
    write_out();
  }

 private:
  const SumProblem& p_;
  const int m_;
  const RowKernels& kernels_;
  std::vector<Tile> tiles_;
  int64_t width_ = 0, sum_size_ = 0, row_bytes_ = 0, slots_ = 1;
  Fetch fetch_ = Fetch::nothing;  // of rows that are summed
  double* sum_ = nullptr;         // [slots][sum_size]

  int64_t tile_count() const { return static_cast<int64_t>(tiles_.size()); }

  void no_columns() { std::fill_n(p_.norms, p_.batch, 0.0); }

  Block make_block(int64_t capacity) const {
    Block block;
    block.products.resize(static_cast<size_t>(capacity * p_.groups * m_));
    block.coefficient.resize(static_cast<size_t>(capacity * p_.groups * 3));
    block.live.resize(static_cast<size_t>(capacity));
    return block;
  }

  const char* now_at(const Tile& t, int64_t sample) const {
    const Column& c = p_.columns[static_cast<size_t>(t.column)];
    return c.now + sample * c.now_stride + t.start * element_bytes(c.element);
  }

  const char* before_at(const Tile& t, int64_t sample) const {
    const Column& c = p_.columns[static_cast<size_t>(t.column)];
    return c.before ? c.before + sample * c.before_stride + t.start * element_bytes(c.element) : nullptr;
  }

  // Inner products of a row over one tile, [m].
  void gram(const Tile& t, int64_t sample, double* products) const {
    const int element = static_cast<int>(p_.columns[static_cast<size_t>(t.column)].element);
    kernels_.gram[static_cast<int>(p_.form)][element](now_at(t, sample), before_at(t, sample), t.length, products);
  }

  void add(Block& block, int row, const Tile& t, const double* products) const {
    double* to = &block.products[static_cast<size_t>((row * p_.groups + t.group) * m_)];
    for (int k = 0; k < m_; ++k) to[k] += products[k];
  }

  // Norms, and coefficients of the rows whose products are all finite.
  void apply_rule(Block& block) const {
    for (int r = 0; r < block.rows; ++r) {
      double norm2 = 0.0;
      bool finite = true;
      for (int g = 0; g < p_.groups; ++g) {
        const double* products = &block.products[static_cast<size_t>((r * p_.groups + g) * m_)];
        norm2 += products[0];
        for (int k = 0; k < m_; ++k) finite = finite && std::isfinite(products[k]);
      }
      p_.norms[block.first + r] = std::sqrt(norm2);
      block.live[static_cast<size_t>(r)] = finite;
      for (int g = 0; finite && g < p_.groups; ++g) {
        const auto at = static_cast<size_t>(r * p_.groups + g);
        p_.rule(g, &block.products[at * static_cast<size_t>(m_)], &block.coefficient[at * 3]);
      }
    }
  }

  // Adds the block's rows to the sum over some tiles, a stretch of neighbours at a time: the last first, as they were
  // read last and may be in a nearer cache.
  void accumulate(const Block& block, int64_t begin, int64_t end, double* sum) const {
    while (begin < end) {
      Tile t = tiles_[static_cast<size_t>(--end)];
      const int64_t least = std::max(begin, end - tiles_at_a_time + 1);
      for (; end > least && tiles_[static_cast<size_t>(end - 1)].column == t.column; --end) {
        const int64_t length = t.length;
        t = tiles_[static_cast<size_t>(end - 1)];
        t.length += length;
      }
      const int element = static_cast<int>(p_.columns[static_cast<size_t>(t.column)].element);
      Row rows[max_block];
      int live = 0;
      for (int r = 0; r < block.rows; ++r) {
        if (!block.live[static_cast<size_t>(r)]) continue;
        const double* c = &block.coefficient[static_cast<size_t>((r * p_.groups + t.group) * 3)];
        rows[live++] = {now_at(t, block.first + r), before_at(t, block.first + r), {c[0], c[1], c[2]}};
      }
      kernels_.accumulate[static_cast<int>(p_.form)][element](sum + t.sum_at, t.length, rows, live, fetch_);
    }
  }

  // On to the next samples, at most `capacity` of them, before `end`; false if there are none.
  static bool next_block(Block& block, int64_t end, int64_t capacity) {
    block.first += block.rows;
    block.rows = static_cast<int>(std::min(capacity, end - block.first));
    std::fill(block.products.begin(), block.products.end(), 0.0);
    return block.rows > 0;
  }

  // Samples in a block: as many as fit in so much cache; 0 if that is hardly one.
  int64_t rows_in(int64_t bytes) const {
    const int64_t fit = bytes / row_bytes_;
    return fit < min_block ? 0 : std::min<int64_t>(fit, max_block);
  }

  // Inner products of a block over some tiles, in the order of memory.
  template <class Take>
  void read(const Block& block, int64_t begin, int64_t end, const Take& take) const {
    double products[max_products];
    while (begin < end) {
      int64_t stop = begin;
      while (stop < end && tiles_[static_cast<size_t>(stop)].column == tiles_[static_cast<size_t>(begin)].column)
        ++stop;
      for (int r = 0; r < block.rows; ++r) {
        for (int64_t t = begin; t < stop; ++t) {
          gram(tiles_[static_cast<size_t>(t)], block.first + r, products);
          take(r, t, products);
        }
      }
      begin = stop;
    }
  }

  void sum_by_samples() {
    const int64_t capacity = std::max<int64_t>(rows_in(cache_bytes() / 4), few_rows);
    fetch_ = row_bytes_ * capacity > cache_bytes() ? fetch_from_afar() : Fetch::nothing;
    parallel_for(0, slots_, 1, [&](int64_t begin, int64_t end) {
      Block block = make_block(capacity);
      for (int64_t slot = begin; slot < end; ++slot) {
        double* sum = sum_ + slot * sum_size_;
        std::fill_n(sum, sum_size_, 0.0);
        const int64_t last = (slot + 1) * p_.batch / slots_;
        block.first = slot * p_.batch / slots_;
        block.rows = 0;
        while (next_block(block, last, capacity)) {
          read(block, 0, tile_count(), [&](int r, int64_t t, const double* products) {
            add(block, r, tiles_[static_cast<size_t>(t)], products);
          });
          apply_rule(block);
          accumulate(block, 0, tile_count(), sum);
        }
      }
    });
  }

  // Inner products of each tile on its own, so that threads may share tiles; then added in order.
  class Partials {
   public:
    Partials(const BlockedSum& sum, int64_t capacity)
        : sum_(sum), values_(static_cast<size_t>(capacity * sum.tile_count() * sum.m_)) {}

    void read(const Block& block, int64_t begin, int64_t end) {
      sum_.read(block, begin, end,
                [&](int r, int64_t t, const double* products) { std::copy_n(products, sum_.m_, at(r, t)); });
    }

    void add_to(Block& block) {
      for (int r = 0; r < block.rows; ++r) {
        for (int64_t t = 0; t < sum_.tile_count(); ++t)
          sum_.add(block, r, sum_.tiles_[static_cast<size_t>(t)], at(r, t));
      }
    }

   private:
    double* at(int row, int64_t tile) {
      return &values_[static_cast<size_t>((row * sum_.tile_count() + tile) * sum_.m_)];
    }
    const BlockedSum& sum_;
    std::vector<double> values_;
  };

  int64_t grain(int64_t rows) const { return grain_elements / ((width_ / tile_count() + 1) * rows) + 1; }

  // One stretch of threads' work sums a block and reads the next: each thread's columns are then in its own cache.
  void sum_by_columns() {
    std::fill_n(sum_, sum_size_, 0.0);
    const int64_t capacity = rows_in_cache();
    Block block = make_block(capacity), next = make_block(capacity);
    Partials partials(*this, capacity);
    while (next_block(next, p_.batch, capacity) || block.rows > 0) {
      parallel_for(0, tile_count(), grain(capacity), [&](int64_t begin, int64_t end) {
        accumulate(block, begin, end, sum_);
        partials.read(next, begin, end);
      });
      partials.add_to(next);
      apply_rule(next);
      std::swap(block, next);
      next.first = block.first, next.rows = block.rows;
    }
  }

  // Samples in a block: as many as the threads' own caches hold, or else the one they share. Longer rows are read from
  // memory twice, so that there blocks are large.
  int64_t rows_in_cache() {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t fit = rows_in(cache_bytes() * 13 / 16 * threads);
    fetch_ = fit == 0 ? fetch_from_afar() : Fetch::nothing;
    if (fit == 0) fit = rows_in(shared_cache_bytes(threads));
    return fit > 0 ? fit : max_block;
  }

  void write_out() const {
    parallel_for(0, tile_count(), grain_elements / tile_elements, [&](int64_t begin, int64_t end) {
      NoiseAdder noise(p_.noise);
      for (int64_t i = begin; i < end; ++i) {
        const Tile& t = tiles_[static_cast<size_t>(i)];
        double* sum = sum_ + t.sum_at;
        for (int64_t slot = 1; slot < slots_; ++slot) {
          const double* other = sum + slot * sum_size_;
          for (int64_t j = 0; j < t.length; ++j) sum[j] += other[j];
        }
        const Column& column = p_.columns[static_cast<size_t>(t.column)];
        if (column.element == Element::f64) {
          noise.add(static_cast<double*>(column.out) + t.start, sum, t.length, t.first);
        } else {
          noise.add(static_cast<float*>(column.out) + t.start, sum, t.length, t.first);
        }
      }
    });
  }
};

}  // namespace

void blocked_sum(const SumProblem& problem) { BlockedSum(problem).run(); }

int64_t tiles_of(int64_t length) { return (length + tile_elements - 1) / tile_elements; }

}  // namespace dpk
