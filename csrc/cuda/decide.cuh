// gather + score (+ assign) in one launch; the counts never leave the chip unless asked for.
//
// grid (chunks of cells, groups of kGroup requests), block 32 * kDecideWarps. Thread block (c, g) gathers chunk c
// of group g's requests and writes its share of their dot products to the workspace. The last one of a group
// (a ticket per group) adds the shares up, chunk by chunk in order, and writes the scores; the last group's
// thread block assigns. Whoever takes the last ticket of a counter sets it back to zero, so a captured graph can
// be replayed. All sums are integers or in a fixed order: the bits do not depend on who comes last.
#pragma once
#include "assign.cuh"
#include "score.cuh"

namespace eldr {

// True in every thread of the block that is the last of `of` to arrive. What the thread blocks wrote before is
// visible to it: each thread fences its writes, the barrier gathers them before the ticket is taken.
__device__ __forceinline__ bool last_to_arrive(unsigned* ticket, unsigned of) {
  ELDR_SHARED(unsigned, last, 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *last = atomicAdd(ticket, 1u) == of - 1;
    if (*last) *ticket = 0;
  }
  __syncthreads();
  const bool answer = *last;
  __syncthreads();  // `last` may be written again
  if (answer) __threadfence();
  return answer;
}

template <class Row, bool kVector, int kGroup>
__global__ void __launch_bounds__(kDecideWarps * 32, kGroup == 1 ? 2 : 1) decide(const DecideParams p) {
  constexpr int kCells = Chunk<Row>::kCells, kThreads = kDecideWarps * 32;
  ELDR_SHARED(uint32_t, counts, kGroup * kCells);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int chunk = blockIdx.x, group = blockIdx.y, request = group * kGroup;
  const int n = least(kGroup, p.requests - request), first = chunk * kCells;
  for (int i = thread; i < kGroup * kCells; i += kThreads) counts[i] = 0;
  __syncthreads();
  for (int q = 0; q < n; ++q) gather<Row, kVector>(p, request + q, first, counts + q * kCells, warp, lane);
  __syncthreads();
  if (p.counts)
    for (int i = thread; i < n * kCells; i += kThreads) {
      const int cell = first + i % kCells;
      if (cell < p.cells)
        p.counts[static_cast<int64_t>(request + i / kCells) * p.cells + cell] =
            static_cast<int32_t>(counts[i / kCells * kCells + place<Row, kVector>(i % kCells)]);
    }
  score_chunk<Row, kVector, kGroup>(p, counts, request, n, chunk, warp, lane);
  if (!last_to_arrive(p.tickets + 1 + group, gridDim.x)) return;
  finish_scores(p, request, n, thread, kThreads);
  if (p.rule == kNone || !last_to_arrive(p.tickets, gridDim.y)) return;
  assign(p, thread, kThreads);
}

}  // namespace eldr
