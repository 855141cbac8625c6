// Scores from shared counts: a chunk's share of every dot product, and their sum over chunks.
//
//   scores[r, w] = (sum_d counts[r, d] * vectors[w, d] + prior[w]) * scale[r]
//   squares: scale = 1 / sqrt(max(sum_d counts^2 * squares, 1e-24));  tokens: scale = 1 / max(tokens + shrinkage, 1e-12)
//
// Every sum has a fixed order: cells within a lane, lanes by butterfly, chunks in turn.
#pragma once
#include "gather.cuh"

namespace eldr {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int bit = 16; bit; bit >>= 1) x += __shfl_xor_sync(kFull, x, bit);
  return x;
}

// Four neighbouring floats; zeros past `left` of them.
template <bool kVector>
__device__ __forceinline__ float4 load4(const float* at, int left) {
  if (kVector && left >= 4) return *reinterpret_cast<const float4*>(at);
  float4 v = {0.f, 0.f, 0.f, 0.f};
  if (!kVector) {
    if (left > 0) v.x = at[0];
    if (left > 1) v.y = at[1];
    if (left > 2) v.z = at[2];
    if (left > 3) v.w = at[3];
  }
  return v;
}

// One chunk of kGroup requests against all workers: warp w takes workers w, w + kDecideWarps, ... A lane keeps
// its cells' counts, cell 4 * (lane + 32 i) + t, in registers and reads every vector once for the whole group.
template <class Row, bool kVector, int kGroup>
__device__ __forceinline__ void score_chunk(const DecideParams& p, const uint32_t* counts, int request, int n,
                                            int chunk, int warp, int lane) {
  constexpr int kQuads = Chunk<Row>::kPerLane / 4, kCells = Chunk<Row>::kCells;
  const int first = chunk * kCells;
  float x[kGroup][kQuads][4];
#pragma unroll
  for (int q = 0; q < kGroup; ++q)
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
#pragma unroll
      for (int t = 0; t < 4; ++t)
        x[q][i][t] = static_cast<float>(counts[q * kCells + place<Row, kVector>(4 * (lane + 32 * i) + t)]);

  for (int w = warp; w < p.workers; w += kDecideWarps) {
    const float* vector = p.vectors + static_cast<int64_t>(w) * p.cells + first;
    float dot[kGroup] = {};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int cell = 4 * (lane + 32 * i);
      const float4 v = load4<kVector>(vector + cell, p.cells - first - cell);
#pragma unroll
      for (int q = 0; q < kGroup; ++q)
        dot[q] = fmaf(x[q][i][3], v.w, fmaf(x[q][i][2], v.z, fmaf(x[q][i][1], v.y, fmaf(x[q][i][0], v.x, dot[q]))));
    }
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      const float sum = warp_sum(dot[q]);
      if (lane == 0 && q < n)
        p.partial[(static_cast<int64_t>(request + q) * p.chunks + chunk) * p.workers + w] = sum;
    }
  }
  if (!p.squares || warp != p.workers % kDecideWarps) return;
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    float norm = 0.f;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int cell = 4 * (lane + 32 * i);
      const float4 v = load4<kVector>(p.squares + first + cell, p.cells - first - cell);
      const float* own = x[q][i];
      norm = fmaf(own[3] * own[3], v.w, fmaf(own[2] * own[2], v.z, fmaf(own[1] * own[1], v.y, fmaf(own[0] * own[0], v.x, norm))));
    }
    norm = warp_sum(norm);
    if (lane == 0 && q < n) p.norms[static_cast<int64_t>(request + q) * p.chunks + chunk] = norm;
  }
}

__device__ __forceinline__ float scale_of(const DecideParams& p, int r) {
  if (p.squares) {
    float norm = 0.f;
#pragma unroll 4
    for (int c = 0; c < p.chunks; ++c) norm += __ldcg(p.norms + static_cast<int64_t>(r) * p.chunks + c);
    return 1.0f / sqrtf(fmaxf(norm, 1e-24f));
  }
  if (p.tokens) return 1.0f / fmaxf(static_cast<float>(p.tokens[r]) + p.shrinkage, 1e-12f);
  return 1.0f;
}

// The scores of requests [request, request + n) once all their chunks are in; one thread per (request, worker).
__device__ __forceinline__ void finish_scores(const DecideParams& p, int request, int n, int thread, int threads) {
  for (int i = thread; i < n * p.workers; i += threads) {
    const int r = request + i / p.workers, w = i % p.workers;
    const float* own = p.partial + static_cast<int64_t>(r) * p.chunks * p.workers + w;
    float dot = 0.f;
#pragma unroll 4
    for (int c = 0; c < p.chunks; ++c) dot += __ldcg(own + static_cast<int64_t>(c) * p.workers);
    if (p.prior) dot += p.prior[w];
    p.scores[static_cast<int64_t>(r) * p.workers + w] = dot * scale_of(p, r);
  }
}

}  // namespace eldr
