// gather: rows are summed four at a time into narrow lanes (u8 rows into u16, u16 rows into u32), which are flushed to
// int32 before they can overflow.
#include <cstdint>
#include <cstring>

#include "columns.h"
#include "simd.h"

namespace eldr::cpu {
namespace {

template <typename Count>
struct Lanes;
template <>
struct Lanes<uint8_t> {
  using Sum = uint16_t;
  static constexpr int kRows = 256;  // 256 * 255 < 2^16
};
template <>
struct Lanes<uint16_t> {
  using Sum = uint32_t;
  static constexpr int kRows = 65536;  // 65536 * 65535 < 2^32
};

template <typename Count, typename Sum>
ELDR_INLINE void add_rows_body(const Count* const* rows, int n, int width, Sum* __restrict sums) {
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    const Count *a = rows[i], *b = rows[i + 1], *c = rows[i + 2], *d = rows[i + 3];
    for (int j = 0; j < width; ++j) {
      sums[j] = static_cast<Sum>(sums[j] + static_cast<Sum>(a[j] + b[j]) + static_cast<Sum>(c[j] + d[j]));
    }
  }
  for (; i < n; ++i) {
    for (int j = 0; j < width; ++j) sums[j] = static_cast<Sum>(sums[j] + rows[i][j]);
  }
}

#if ELDR_HAS_AVX2_BUILD
template <typename Count, typename Sum>
ELDR_TARGET_AVX2 void add_rows_avx2(const Count* const* rows, int n, int width, Sum* sums) {
  add_rows_body<Count, Sum>(rows, n, width, sums);
}
#endif

template <typename Count, typename Sum>
void add_rows(const Count* const* rows, int n, int width, Sum* sums, bool avx2) {
#if ELDR_HAS_AVX2_BUILD
  if (avx2) return add_rows_avx2<Count, Sum>(rows, n, width, sums);
#endif
  (void)avx2;
  add_rows_body<Count, Sum>(rows, n, width, sums);
}

template <typename Count>
void gather(const eldr_gather_args& a, int request, int64_t column, int width, int32_t* counts) {
  using Sum = typename Lanes<Count>::Sum;
  constexpr int kBatch = 64;  // row pointers looked up ahead
  const auto clamp = [&](int64_t i) { return std::clamp<int64_t>(i, 0, a.num_ids); };
  const int64_t begin = clamp(a.offsets[request]), end = clamp(a.offsets[request + 1]);
  const bool avx2 = use_avx2();
  alignas(64) Sum sums[kChunk] = {};
  std::memset(counts, 0, sizeof(int32_t) * static_cast<size_t>(width));
  const Count* rows[kBatch];
  int pending = 0;
  const auto flush = [&] {
    for (int j = 0; j < width; ++j) counts[j] += static_cast<int32_t>(sums[j]);
    std::memset(sums, 0, sizeof sums);
    pending = 0;
  };
  for (int64_t i = begin; i < end;) {
    int n = 0;
    for (; i < end && n < kBatch; ++i) {
      const int64_t block = a.block_ids[i];
      if (block < 0 || block >= a.num_blocks) continue;
      rows[n++] = static_cast<const Count*>(a.histograms) + block * a.hist_stride_block + column;
    }
    if (pending + n > Lanes<Count>::kRows) flush();
    add_rows<Count, Sum>(rows, n, width, sums, avx2);
    pending += n;
  }
  flush();
}

}  // namespace

void gather_chunk(const eldr_gather_args& a, int request, int64_t column, int width, int32_t* counts) {
  if (a.hist_dtype == ELDR_U8) {
    gather<uint8_t>(a, request, column, width, counts);
  } else {
    gather<uint16_t>(a, request, column, width, counts);
  }
}

}  // namespace eldr::cpu

extern "C" int eldr_cpu_gather(const eldr_gather_args* args) {
  using namespace eldr::cpu;
  const eldr_gather_args& a = *args;
  if (a.hist_dtype != ELDR_U8 && a.hist_dtype != ELDR_U16) return ELDR_UNSUPPORTED;
  const int64_t chunks = chunks_of(a.cells), items = a.requests * chunks;
#pragma omp parallel for schedule(dynamic, 1) if (items > 1)
  for (int64_t item = 0; item < items; ++item) {
    const auto request = static_cast<int>(item / chunks);
    const int64_t column = item % chunks * kChunk;
    const auto width = static_cast<int>(std::min<int64_t>(kChunk, a.cells - column));
    gather_chunk(a, request, column, width, a.counts + request * a.cells + column);
  }
  return 0;
}
