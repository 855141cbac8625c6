// accumulate: one task per block touched in this step, so that every row is written by one thread and stays in
// L1 while its tokens' ids stream past once.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "../eldr_launch.h"
#include "simd.h"

namespace eldr::cpu {
namespace {

// A stretch of consecutive tokens of one block, padding excluded.
struct Run {
  int64_t block;
  int64_t begin, end;
  bool fresh;  // holds a token at offset 0
};

std::vector<Run> find_runs(const eldr_accumulate_args& a) {
  std::vector<Run> runs;
  runs.reserve(static_cast<size_t>(a.tokens / a.block_size + 8));
  for (int64_t t = 0; t < a.tokens;) {
    const int64_t slot = a.slots[t];
    const int64_t block = slot / a.block_size;
    if (slot < 0 || block >= a.num_blocks) {
      ++t;
      continue;
    }
    const int64_t first = block * a.block_size, last = first + a.block_size;
    Run run{block, t, t, false};
    for (; t < a.tokens && a.slots[t] >= first && a.slots[t] < last; ++t) run.fresh |= a.slots[t] == first;
    run.end = t;
    runs.push_back(run);
  }
  // Runs of one block become neighbours; their order does not matter, sums commute.
  const auto by_block = [](const Run& x, const Run& y) { return x.block < y.block; };
  if (!std::is_sorted(runs.begin(), runs.end(), by_block)) std::stable_sort(runs.begin(), runs.end(), by_block);
  return runs;
}

// Bytes of ids fetched ahead; less than 1 KB or more than 4 KB measured slower.
constexpr int kAhead = 2048;

// Adds the hits of tokens [begin, end) to one row. K = 0 reads top_k from the arguments. Saturating is only needed
// where the count could pass the dtype's maximum.
template <typename Id, typename Count, int K, bool Saturate>
ELDR_INLINE void add_hits(const eldr_accumulate_args& a, int64_t begin, int64_t end, Count* row) {
  using Unsigned = std::make_unsigned_t<Id>;
  const int top_k = K ? K : a.top_k;
  const auto experts = static_cast<uint64_t>(a.experts);
  for (int64_t t = begin; t < end; ++t) {
    const Id* ids = static_cast<const Id*>(a.ids) + t * a.ids_stride_token;
    Count* cell = row;
    for (int l = 0; l < a.layers; ++l, ids += a.ids_stride_layer, cell += a.experts) {
      __builtin_prefetch(reinterpret_cast<const char*>(ids) + kAhead);
#pragma GCC unroll 8
      for (int k = 0; k < top_k; ++k) {
        const auto expert = static_cast<Unsigned>(ids[k]);  // negative ids become too large ones
        if (__builtin_expect(expert >= experts, 0)) continue;
        if constexpr (Saturate) {
          cell[expert] += cell[expert] != std::numeric_limits<Count>::max();
        } else {
          ++cell[expert];
        }
      }
    }
  }
}

template <typename Id, typename Count, bool Saturate>
void add_run(const eldr_accumulate_args& a, int64_t begin, int64_t end, Count* row) {
  switch (a.top_k) {
    case 4: return add_hits<Id, Count, 4, Saturate>(a, begin, end, row);
    case 6: return add_hits<Id, Count, 6, Saturate>(a, begin, end, row);
    case 8: return add_hits<Id, Count, 8, Saturate>(a, begin, end, row);
    default: return add_hits<Id, Count, 0, Saturate>(a, begin, end, row);
  }
}

// The next block's row, so that it arrives while this one is counted.
template <typename Count>
void prefetch_row(const eldr_accumulate_args& a, int64_t block) {
  const char* row = reinterpret_cast<const char*>(static_cast<Count*>(a.histograms) + block * a.hist_stride_block);
  const int64_t bytes = static_cast<int64_t>(sizeof(Count)) * a.layers * a.experts;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 1);
}

// row = min(row + added, maximum), in a form that vectorises.
template <typename Count>
void add_saturating(Count* __restrict row, const Count* __restrict added, size_t cells) {
  constexpr Count kMax = std::numeric_limits<Count>::max();
  for (size_t i = 0; i < cells; ++i) {
    const auto room = static_cast<Count>(kMax - added[i]);
    row[i] = static_cast<Count>((row[i] < room ? row[i] : room) + added[i]);
  }
}

// A long run into a row that could overflow: counted apart, a safe number of tokens at a time, and added saturating.
template <typename Id, typename Count>
void add_in_pieces(const eldr_accumulate_args& a, int64_t begin, int64_t end, Count* row) {
  thread_local std::vector<Count> piece;
  const size_t cells = static_cast<size_t>(a.layers) * static_cast<size_t>(a.experts);
  const int64_t safe = std::numeric_limits<Count>::max() / a.top_k;
  for (; begin < end; begin += safe) {
    piece.assign(cells, 0);
    add_run<Id, Count, false>(a, begin, std::min(begin + safe, end), piece.data());
    add_saturating(row, piece.data(), cells);
  }
}

// All runs of one block: zero the row if any is fresh, then add.
template <typename Id, typename Count>
void fill_row(const eldr_accumulate_args& a, const Run* runs, size_t n) {
  constexpr int64_t kMax = std::numeric_limits<Count>::max();
  Count* row = static_cast<Count*>(a.histograms) + runs[0].block * a.hist_stride_block;
  const bool fresh = std::any_of(runs, runs + n, [](const Run& run) { return run.fresh; });
  if (fresh) std::memset(row, 0, sizeof(Count) * static_cast<size_t>(a.layers) * static_cast<size_t>(a.experts));
  int64_t hits = 0;  // of one layer
  for (size_t i = 0; i < n; ++i) hits += (runs[i].end - runs[i].begin) * a.top_k;
  for (size_t i = 0; i < n; ++i) {
    const int64_t own = (runs[i].end - runs[i].begin) * a.top_k;
    if (fresh && hits <= kMax) {
      add_run<Id, Count, false>(a, runs[i].begin, runs[i].end, row);
    } else if (own < a.experts || a.top_k > kMax) {
      add_run<Id, Count, true>(a, runs[i].begin, runs[i].end, row);  // few hits: cheaper than a pass over the row
    } else {
      add_in_pieces<Id, Count>(a, runs[i].begin, runs[i].end, row);
    }
  }
}

template <typename Id, typename Count>
int accumulate(const eldr_accumulate_args& a) {
  const std::vector<Run> runs = find_runs(a);
  std::vector<size_t> starts;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (i == 0 || runs[i].block != runs[i - 1].block) starts.push_back(i);
  }
  const auto rows = static_cast<int64_t>(starts.size());
  starts.push_back(runs.size());
#pragma omp parallel for schedule(static) if (a.tokens * a.layers * a.top_k > 16384)
  for (int64_t i = 0; i < rows; ++i) {
    if (i + 1 < rows) prefetch_row<Count>(a, runs[starts[i + 1]].block);
    fill_row<Id, Count>(a, runs.data() + starts[i], starts[i + 1] - starts[i]);
  }
  return 0;
}

template <typename Id>
int by_count(const eldr_accumulate_args& a) {
  if (a.hist_dtype == ELDR_U8) return accumulate<Id, uint8_t>(a);
  if (a.hist_dtype == ELDR_U16) return accumulate<Id, uint16_t>(a);
  return ELDR_UNSUPPORTED;
}

}  // namespace
}  // namespace eldr::cpu

extern "C" int eldr_cpu_accumulate(const eldr_accumulate_args* args) {
  using namespace eldr::cpu;
  switch (args->ids_dtype) {
    case ELDR_U8: return by_count<uint8_t>(*args);
    case ELDR_U16: return by_count<uint16_t>(*args);
    case ELDR_I32: return by_count<int32_t>(*args);
    case ELDR_I64: return by_count<int64_t>(*args);
    default: return ELDR_UNSUPPORTED;
  }
}
