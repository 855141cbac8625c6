// Picks a worker for each request in turn (rules in csrc/eldr_launch.h). One warp walks the requests, since each
// choice changes the loads that the next one sees; the whole thread block fetches scores ahead of it.
#pragma once
#include "decide_params.cuh"

namespace eldr {

enum Rule { kNone = 0, kLeastLoad = 1, kLocalityBand = 2, kMarginalCost = 3 };
constexpr int32_t kClosed = 0x7fffffff;  // load of a worker that must not be chosen
constexpr int kStage = 4096;             // scores fetched ahead

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// An unsigned number that orders like x; -0 and +0 are the same.
__device__ __forceinline__ uint32_t order(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float from_order(uint32_t k) {
  return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}
__device__ __forceinline__ uint32_t order(int32_t x) { return static_cast<uint32_t>(x) ^ 0x80000000u; }

// The best worker so far: least `key`, then greatest `tie`, then least `index`.
struct Best {
  uint32_t key = kFull, tie = 0, index = kFull;
  __device__ __forceinline__ void offer(uint32_t k, uint32_t t, uint32_t w) {
    const bool better = k < key || (k == key && (t > tie || index == kFull));
    if (better) key = k, tie = t, index = w;  // workers come in ascending order: equals keep the first
  }
  // The best of the warp, or kFull where no lane has one.
  __device__ __forceinline__ uint32_t of_warp() const {
    const uint32_t k = __reduce_min_sync(kFull, key);
    const bool first = index != kFull && key == k;
    const uint32_t t = __reduce_max_sync(kFull, first ? tie : 0u);
    return __reduce_min_sync(kFull, first && tie == t ? index : kFull);
  }
};

struct Fleet {  // in shared memory; lane l alone reads and writes workers l, l + 32, ...
  int32_t* load;
  float* distinct;
  float* kv;
};

__device__ __forceinline__ float cost_of(const DecideParams& p, const Fleet& f, int w, float score, float kv) {
  const float n = static_cast<float>(f.load[w]);
  const float added = __fadd_rn(__fadd_rn(__fmul_rn(p.c_expert, score), __fmul_rn(p.c_kv, kv)), p.c_request);
  const float now = __fadd_rn(__fadd_rn(__fmul_rn(p.c_expert, f.distinct[w]), __fmul_rn(p.c_kv, f.kv[w])),
                              __fmul_rn(p.c_request, n));
  return __fadd_rn(__fadd_rn(now, added), __fmul_rn(__fmul_rn(p.hedge, n), added));
}

__device__ __forceinline__ float positive(float score) { return score > 0.f ? score : 0.f; }  // NaN: 0

__device__ __forceinline__ uint32_t choose(const DecideParams& p, const Fleet& f, const float* scores, float kv,
                                           int lane) {
  float floor = 0.f;
  if (p.rule == kLocalityBand) {
    uint32_t best = order(-infinity());
    for (int w = lane; w < p.workers; w += 32)
      if (f.load[w] != kClosed && order(scores[w]) > best && scores[w] == scores[w]) best = order(scores[w]);
    floor = from_order(__reduce_max_sync(kFull, best)) - p.tau;
  }
  Best best;
  for (int w = lane; w < p.workers; w += 32) {
    if (f.load[w] == kClosed) continue;
    if (p.rule == kMarginalCost) {
      const float cost = cost_of(p, f, w, positive(scores[w]), kv);
      best.offer(order(cost == cost ? cost : infinity()), 0, w);
    } else if (p.rule == kLeastLoad) {
      best.offer(order(f.load[w]), 0, w);
    } else {
      const float s = scores[w] == scores[w] ? scores[w] : -infinity();
      if (s >= floor) best.offer(order(f.load[w]), order(s), w);
    }
  }
  return best.of_warp();
}

__device__ __forceinline__ void occupy(const DecideParams& p, const Fleet& f, uint32_t w, float score, int cost,
                                       float kv) {
  const int64_t load = static_cast<int64_t>(f.load[w]) + (cost > 0 ? cost : 0);
  f.load[w] = static_cast<int32_t>(load < kClosed ? load : kClosed - 1);
  if (p.rule != kMarginalCost) return;
  f.distinct[w] = __fadd_rn(f.distinct[w], positive(score));
  f.kv[w] = __fadd_rn(f.kv[w], kv);
}

// All requests, by one thread block; `scores` of other thread blocks must be visible.
__device__ __forceinline__ void assign(const DecideParams& p, int thread, int threads) {
  ELDR_SHARED(int32_t, load, kMaxWorkers);
  ELDR_SHARED(float, distinct, kMaxWorkers);
  ELDR_SHARED(float, kv, kMaxWorkers);
  ELDR_SHARED(float, staged, kStage);
  ELDR_SHARED(int32_t, staged_cost, kMaxRequests);
  ELDR_SHARED(float, staged_kv, kMaxRequests);
  const Fleet fleet{load, distinct, kv};
  const bool stateful = p.rule == kMarginalCost;
  for (int w = thread; w < p.workers; w += threads) {
    load[w] = p.load[w];
    distinct[w] = stateful ? p.state[w] : 0.f;
    kv[w] = stateful ? p.state[p.workers + w] : 0.f;
  }
  for (int r = thread; r < p.requests; r += threads) {
    staged_cost[r] = p.cost[r];
    staged_kv[r] = stateful ? p.request_kv[r] : 0.f;
  }
  const int batch = kStage / p.workers;
  for (int base = 0; base < p.requests; base += batch) {
    const int n = least(batch, p.requests - base);
    const float* scores = p.scores + static_cast<int64_t>(base) * p.workers;
    for (int i = thread; i < n * p.workers; i += threads) staged[i] = __ldcg(scores + i);
    __syncthreads();
    if (thread < 32) {
#pragma unroll 1
      for (int q = 0; q < n; ++q) {
        const float* own = staged + q * p.workers;
        const float request_kv = staged_kv[base + q];
        const uint32_t w = choose(p, fleet, own, request_kv, thread);
        if (w != kFull && static_cast<int>(w % 32) == thread)
          occupy(p, fleet, w, own[w], staged_cost[base + q], request_kv);
        if (thread == 0) p.chosen[base + q] = static_cast<int32_t>(w);
      }
    }
    __syncthreads();
  }
  for (int w = thread; w < p.workers; w += threads) {
    p.load[w] = load[w];
    if (stateful) p.state[w] = distinct[w], p.state[p.workers + w] = kv[w];
  }
}

}  // namespace eldr
