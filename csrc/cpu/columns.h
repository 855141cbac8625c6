// Shared by gather, score and decide: work is cut into fixed column chunks, so that sums have the same order
// whatever the number of threads, and a chunk's partial results stay in cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../eldr_launch.h"

namespace eldr::cpu {

constexpr int kChunk = 1024;  // cells per chunk

inline int64_t chunks_of(int64_t cells) { return (cells + kChunk - 1) / kChunk; }

// counts[i] = sum of the request's rows at columns [column, column + width), width <= kChunk.
void gather_chunk(const eldr_gather_args& a, int request, int64_t column, int width, int32_t* counts);

// dots[w] = sum_i x[i] * vectors[w, column + i]; the last sum is sum_i x[i]^2 * squares[column + i] (0 without squares).
float score_chunk(const float* x, int64_t cells, int64_t column, int width, const eldr_score_args& a, float* dots);

// scores[r, :] from the chunks' partial sums: dots [chunks, workers], norms [chunks], in ascending chunk order.
void finish_scores(const float* dots, const float* norms, int64_t chunks, int request, const eldr_score_args& a);

}  // namespace eldr::cpu
