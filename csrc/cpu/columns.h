// Shared by gather, score and decide: work is cut into fixed column chunks, so that sums have the same order
// whatever the number of threads, and a chunk's partial results stay in cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "../eldr_launch.h"

namespace eldr::cpu {

constexpr int kChunk = 1024;  // cells per chunk

inline int64_t chunks_of(int64_t cells) { return (cells + kChunk - 1) / kChunk; }

// counts[i] = sum of the request's rows at columns [column, column + width), width <= kChunk.
void gather_chunk(const eldr_gather_args& a, int request, int64_t column, int width, int32_t* counts);

// Writes counts of request r at columns [column, column + width) as floats.
using Counts = std::function<void(int r, int64_t column, int width, float* x)>;

// Scores of all requests; `counts` is called once per (request, chunk), from several threads.
void score_groups(int requests, int64_t cells, const eldr_score_args& a, const Counts& counts);

}  // namespace eldr::cpu
