// score: dot products of one chunk of counts with the same columns of every vector, for a group of requests, so that a
// vector is read once per group. A pair's sum has the same order in whatever tile it is computed.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "columns.h"
#include "simd.h"

namespace eldr::cpu {
namespace {

// Eight floats; the compiler lowers them to whatever the target has.
typedef float Vector __attribute__((vector_size(32)));
constexpr int kLanes = 8;

ELDR_INLINE void load(Vector& v, const float* p) { std::memcpy(&v, p, sizeof v); }

ELDR_INLINE float sum(const Vector& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// dots[i * stride + j] = <x[i], rows[j]> for R counts and N rows.
template <int R, int N>
ELDR_INLINE void dot_tile(const float* const* x, const float* const* rows, int width, float* dots, int64_t stride) {
  Vector total[R][N] = {};
  Vector a[R], v;
  int k = 0;
  for (; k + kLanes <= width; k += kLanes) {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) load(a[i], x[i] + k);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      load(v, rows[j] + k);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) total[i][j] += a[i] * v;
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < N; ++j) {
      float tail = 0.0f;
      for (int m = k; m < width; ++m) tail += x[i][m] * rows[j][m];
      dots[i * stride + j] = sum(total[i][j]) + tail;
    }
  }
}

// All vectors against R requests; N vectors a tile, so that the sums stay in registers.
template <int R, int N>
ELDR_INLINE void dot_rows(const float* const* x, const float* vectors, int64_t stride, int width, int workers, float* dots) {
  const float* rows[N];
  int w = 0;
  for (; w + N <= workers; w += N) {
    for (int j = 0; j < N; ++j) rows[j] = vectors + (w + j) * stride;
    dot_tile<R, N>(x, rows, width, dots + w, workers);
  }
  for (; w < workers; ++w) {
    rows[0] = vectors + w * stride;
    dot_tile<R, 1>(x, rows, width, dots + w, workers);
  }
}

struct Group {
  const float* x;  // [requests, kChunk]
  int requests, width, workers;
  const float* vectors;  // first worker's columns of this chunk
  int64_t stride;
  const float* squares;  // this chunk's columns, or NULL
  float* dots;           // [requests, workers]
  float* norms;          // [requests]
};

ELDR_INLINE void group_body(const Group& g) {
  int r = 0;
  for (; r + 3 <= g.requests; r += 3) {
    const float* x[3] = {g.x + r * kChunk, g.x + (r + 1) * kChunk, g.x + (r + 2) * kChunk};
    dot_rows<3, 4>(x, g.vectors, g.stride, g.width, g.workers, g.dots + static_cast<int64_t>(r) * g.workers);
  }
  for (; r < g.requests; ++r) {
    const float* x[1] = {g.x + r * kChunk};
    dot_rows<1, 8>(x, g.vectors, g.stride, g.width, g.workers, g.dots + static_cast<int64_t>(r) * g.workers);
  }
  for (r = 0; r < g.requests; ++r) {
    g.norms[r] = 0.0f;
    if (g.squares == nullptr) continue;
    const float* x[1] = {g.x + r * kChunk};
    float weighted[kChunk];
    for (int i = 0; i < g.width; ++i) weighted[i] = x[0][i] * g.squares[i];
    dot_rows<1, 1>(x, weighted, 0, g.width, 1, g.norms + r);
  }
}

#if ELDR_HAS_AVX2_BUILD
ELDR_TARGET_AVX2 void group_avx2(const Group& g) { group_body(g); }
#endif

float scale(float norm, int request, const eldr_score_args& a) {
  if (a.squares != nullptr) return 1.0f / std::sqrt(std::max(norm, 1e-24f));
  if (a.tokens != nullptr) return 1.0f / std::max(static_cast<float>(a.tokens[request]) + a.shrinkage, 1e-12f);
  return 1.0f;
}

// scores[r, :] from the chunks' partial sums, in ascending chunk order.
void finish_scores(const float* dots, const float* norms, int64_t chunks, int requests, int r, const eldr_score_args& a) {
  float* scores = a.scores + static_cast<int64_t>(r) * a.workers;
  float norm = 0.0f;
  for (int64_t c = 0; c < chunks; ++c) norm += norms[c * requests + r];
  const float factor = scale(norm, r, a);
  for (int w = 0; w < a.workers; ++w) {
    float dot = a.prior != nullptr ? a.prior[w] : 0.0f;
    for (int64_t c = 0; c < chunks; ++c) dot += dots[(c * requests + r) * a.workers + w];
    scores[w] = dot * factor;
  }
}

constexpr int kGroup = 24;  // requests that share one reading of the vectors; 96 KB of counts

// Large groups read less, small ones keep all threads busy.
int group_size(int requests, int64_t chunks) {
  const int64_t even = requests * chunks / (2 * omp_get_max_threads());
  return static_cast<int>(std::clamp<int64_t>(even / 3 * 3, 1, kGroup));
}

void score_chunk(const float* x, int requests, int64_t cells, int64_t column, int width, const eldr_score_args& a,
                 float* dots, float* norms) {
  const float* squares = a.squares != nullptr ? a.squares + column : nullptr;
  const Group group{x, requests, width, a.workers, a.vectors + column, cells, squares, dots, norms};
#if ELDR_HAS_AVX2_BUILD
  if (use_avx2()) return group_avx2(group);
#endif
  group_body(group);
}

}  // namespace

void score_groups(int requests, int64_t cells, const eldr_score_args& a, const Counts& counts) {
  const int64_t chunks = chunks_of(cells);
  const int size = group_size(requests, chunks);
  const int64_t groups = (requests + size - 1) / size, items = groups * chunks;
  // Partial sums [chunks, requests, workers] and [chunks, requests].
  std::vector<float> dots(static_cast<size_t>(chunks * requests * a.workers)), norms(static_cast<size_t>(chunks * requests));
#pragma omp parallel for schedule(dynamic, 1) if (items > 1)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t chunk = item % chunks, column = chunk * kChunk;
    const auto first = static_cast<int>(item / chunks) * size, n = std::min(size, requests - first);
    const auto width = static_cast<int>(std::min<int64_t>(kChunk, cells - column));
    alignas(64) float x[kGroup * kChunk];
    for (int i = 0; i < n; ++i) counts(first + i, column, width, x + i * kChunk);
    const int64_t at = chunk * requests + first;
    score_chunk(x, n, cells, column, width, a, dots.data() + at * a.workers, norms.data() + at);
  }
  for (int r = 0; r < requests; ++r) finish_scores(dots.data(), norms.data(), chunks, requests, r, a);
}

}  // namespace eldr::cpu

extern "C" int eldr_cpu_score(const int32_t* counts, int requests, int64_t cells, const eldr_score_args* args) {
  eldr::cpu::score_groups(requests, cells, *args, [=](int r, int64_t column, int width, float* x) {
    for (int i = 0; i < width; ++i) x[i] = static_cast<float>(counts[r * cells + column + i]);
  });
  return 0;
}
