// score: dot products of one chunk of counts with the same columns of every vector, four vectors at a time so that
// the counts are loaded once per four.
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

// dots[j] = <x, rows[j]> for N rows.
template <int N>
ELDR_INLINE void dot_rows(const float* x, const float* const* rows, int width, float* dots) {
  Vector even[N] = {}, odd[N] = {};
  Vector a, b, v;
  int i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    load(a, x + i);
    load(b, x + i + kLanes);
    for (int j = 0; j < N; ++j) {
      load(v, rows[j] + i);
      even[j] += a * v;
      load(v, rows[j] + i + kLanes);
      odd[j] += b * v;
    }
  }
  for (int j = 0; j < N; ++j) {
    float tail = 0.0f;
    for (int k = i; k < width; ++k) tail += x[k] * rows[j][k];
    dots[j] = sum(even[j] + odd[j]) + tail;
  }
}

struct ChunkDots {
  const float* x;
  const float* vectors;  // first worker's columns of this chunk
  int64_t stride;
  int width, workers;
  const float* squares;  // this chunk's columns, or NULL
  float* dots;
};

ELDR_INLINE float chunk_dots_body(const ChunkDots& c) {
  const float* rows[4];
  int w = 0;
  for (; w + 4 <= c.workers; w += 4) {
    for (int j = 0; j < 4; ++j) rows[j] = c.vectors + (w + j) * c.stride;
    dot_rows<4>(c.x, rows, c.width, c.dots + w);
  }
  for (; w < c.workers; ++w) {
    rows[0] = c.vectors + w * c.stride;
    dot_rows<1>(c.x, rows, c.width, c.dots + w);
  }
  if (c.squares == nullptr) return 0.0f;
  float weighted[kChunk], norm;
  for (int i = 0; i < c.width; ++i) weighted[i] = c.x[i] * c.squares[i];
  rows[0] = weighted;
  dot_rows<1>(c.x, rows, c.width, &norm);
  return norm;
}

#if ELDR_HAS_AVX2_BUILD
ELDR_TARGET_AVX2 float chunk_dots_avx2(const ChunkDots& c) { return chunk_dots_body(c); }
#endif

float chunk_dots(const ChunkDots& c) {
#if ELDR_HAS_AVX2_BUILD
  if (use_avx2()) return chunk_dots_avx2(c);
#endif
  return chunk_dots_body(c);
}

float scale(float norm, int request, const eldr_score_args& a) {
  if (a.squares != nullptr) return 1.0f / std::sqrt(std::max(norm, 1e-24f));
  if (a.tokens != nullptr) return 1.0f / std::max(static_cast<float>(a.tokens[request]) + a.shrinkage, 1e-12f);
  return 1.0f;
}

}  // namespace

float score_chunk(const float* x, int64_t cells, int64_t column, int width, const eldr_score_args& a, float* dots) {
  return chunk_dots({x, a.vectors + column, cells, width, a.workers, a.squares ? a.squares + column : nullptr, dots});
}

void finish_scores(const float* dots, const float* norms, int64_t chunks, int request, const eldr_score_args& a) {
  float* scores = a.scores + static_cast<int64_t>(request) * a.workers;
  float norm = 0.0f;
  for (int64_t c = 0; c < chunks; ++c) norm += norms[c];
  const float factor = scale(norm, request, a);
  for (int w = 0; w < a.workers; ++w) {
    float dot = a.prior != nullptr ? a.prior[w] : 0.0f;
    for (int64_t c = 0; c < chunks; ++c) dot += dots[c * a.workers + w];
    scores[w] = dot * factor;
  }
}

}  // namespace eldr::cpu

extern "C" int eldr_cpu_score(const int32_t* counts, int requests, int64_t cells, const eldr_score_args* args) {
  using namespace eldr::cpu;
  const eldr_score_args& a = *args;
  const int64_t chunks = chunks_of(cells), items = requests * chunks;
  std::vector<float> dots(static_cast<size_t>(items * a.workers)), norms(static_cast<size_t>(items));
#pragma omp parallel for schedule(static) if (items * a.workers > 64)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t request = item / chunks, column = item % chunks * kChunk;
    const auto width = static_cast<int>(std::min<int64_t>(kChunk, cells - column));
    float x[kChunk];
    for (int i = 0; i < width; ++i) x[i] = static_cast<float>(counts[request * cells + column + i]);
    norms[item] = score_chunk(x, cells, column, width, a, dots.data() + item * a.workers);
  }
  for (int r = 0; r < requests; ++r) {
    finish_scores(dots.data() + r * chunks * a.workers, norms.data() + r * chunks, chunks, r, a);
  }
  return 0;
}
