// Adds one step's routed expert ids to the block histograms, all layers in one launch.
//
//   rows[b, l, e] = (fresh(b) ? 0 : rows[b, l, e]) + #{(t, k) : slots[t] / B == b and ids[t, l, k] == e}
//   fresh(b): some t has slots[t] == b * B
//
// grid (ceil(tokens / 32), ceil(layers / kAccumulateWarps)), block 32 * kAccumulateWarps. Warp w of block (x, y)
// has layer y * kAccumulateWarps + w and owns every run (the tokens of one KV block) whose first token is one
// of [32 x, 32 x + 32). It counts the run in its own packed bins in shared memory and writes the row once: a
// row has one writer, there are no global atomics, and integer sums make the result independent of order.
#pragma once
#include "common.cuh"

namespace eldr {

constexpr int kAccumulateWarps = 8;
constexpr int kMaxExperts = 512;

struct AccumulateParams {
  const void* ids;       // [tokens, layers, top_k] of Id, strides below, dense along top_k
  const int64_t* slots;  // [tokens]
  void* rows;            // [num_blocks, layers, experts] of Row
  int64_t ids_stride_token, ids_stride_layer, row_stride;
  int tokens, layers, top_k, experts, block_size;
  int slot_limit;  // num_blocks * block_size
  int words;       // 1: every row starts at a multiple of 4 bytes and is a multiple of 4 bytes long
};

// The slot of token t; -1 for padding, slots past the cache, and tokens past the step.
__device__ __forceinline__ int slot_at(const AccumulateParams& p, int t) {
  if (t < 0 || t >= p.tokens) return -1;
  const int64_t slot = p.slots[t];
  return slot >= 0 && slot < p.slot_limit ? static_cast<int>(slot) : -1;
}

// kBits-wide counters packed into words. 8 bits hold a run of at most 255 ids, 16 bits one of 65535.
template <int kBits>
struct Bins {
  static constexpr int kPerWord = 32 / kBits;
  uint32_t* word;

  __device__ __forceinline__ void clear(int experts, int lane) {
    for (int w = lane; w * kPerWord < experts; w += 32) word[w] = 0;
  }
  __device__ __forceinline__ void add(int e) {
    atomicAdd(word + e / kPerWord, 1u << (e % kPerWord * kBits));
  }
  __device__ __forceinline__ uint32_t at(int e) const {
    return word[e / kPerWord] >> (e % kPerWord * kBits) & ((1u << kBits) - 1u);
  }
};

template <class Id, int kBytes>
struct alignas(kBytes) Pack {
  static constexpr int kIds = kBytes / sizeof(Id);
  Id id[kIds];
};

// Counts one layer's ids of the tokens [from, from + n) whose bit in `inside` is set (n <= 32).
template <class Id, int kBytes, int kBits>
__device__ __forceinline__ void count(const AccumulateParams& p, Bins<kBits> bins, int from, int n,
                                      unsigned inside, int layer, int lane) {
  using Vector = Pack<Id, kBytes>;
  const Id* ids = static_cast<const Id*>(p.ids) + layer * p.ids_stride_layer;
  const int per_token = p.top_k / Vector::kIds;
  for (int q = lane; q < n * per_token; q += 32) {
    const int token = q / per_token;
    if (!(inside >> token & 1)) continue;
    const Id* at = ids + (from + token) * p.ids_stride_token + q % per_token * Vector::kIds;
    const Vector v = *reinterpret_cast<const Vector*>(at);
#pragma unroll
    for (int j = 0; j < Vector::kIds; ++j) {
      const int64_t e = static_cast<int64_t>(v.id[j]);
      if (e >= 0 && e < p.experts) bins.add(static_cast<int>(e));
    }
  }
}

template <class Row>
__device__ __forceinline__ uint32_t saturate(uint32_t n) {
  constexpr uint32_t kMax = (1u << (8 * sizeof(Row))) - 1u;
  return n < kMax ? n : kMax;
}

// row = saturate((fresh ? 0 : row) + bins): one 128-byte line a step of the warp where rows are whole words.
template <class Row, int kBits>
__device__ __forceinline__ void write_row(const AccumulateParams& p, Bins<kBits> bins, Row* row, bool fresh,
                                          int lane) {
  if (!p.words) {
    for (int e = lane; e < p.experts; e += 32)
      row[e] = static_cast<Row>(saturate<Row>((fresh ? 0u : row[e]) + bins.at(e)));
    return;
  }
  constexpr int kPack = 4 / sizeof(Row), kWidth = 8 * sizeof(Row);
  uint32_t* out = reinterpret_cast<uint32_t*>(row);
  for (int w = lane; w * kPack < p.experts; w += 32) {
    const uint32_t old = fresh ? 0u : out[w];
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const uint32_t was = old >> (j * kWidth) & ((1u << kWidth) - 1u);
      sum |= saturate<Row>(was + bins.at(w * kPack + j)) << (j * kWidth);
    }
    out[w] = sum;
  }
}

// True where a token of the same KV block lies among the block_size - 1 tokens before `begin`: then the run
// began there and is not ours.
__device__ __forceinline__ bool began_earlier(const AccumulateParams& p, int begin, int first, int lane) {
  for (int back = 1; back < p.block_size && back <= begin; back += 32) {
    const int slot = back + lane < p.block_size ? slot_at(p, begin - back - lane) : -1;
    if (__ballot_sync(kFull, slot >= first && slot - first < p.block_size)) return true;
  }
  return false;
}

template <class Id, class Row, int kBits, int kBytes>
__global__ void __launch_bounds__(kAccumulateWarps * 32, 5) accumulate(const AccumulateParams p) {
  ELDR_SHARED(uint32_t, shared, kAccumulateWarps * kMaxExperts * kBits / 32);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int layer = blockIdx.y * kAccumulateWarps + warp;
  if (layer >= p.layers) return;  // the whole warp: below, only warps synchronise
  Bins<kBits> bins{shared + warp * (kMaxExperts * kBits / 32)};
  const int tile = blockIdx.x * 32;
  const int slot = slot_at(p, tile + lane), before = slot_at(p, tile + lane - 1);
  const int block = slot < 0 ? -1 : slot / p.block_size;
  unsigned heads = __ballot_sync(kFull, slot >= 0 && (before < 0 || before / p.block_size != block));
  while (heads) {
    const int source = __ffs(heads) - 1;
    heads &= heads - 1;
    const int begin = tile + source, end = least(begin + p.block_size, p.tokens);
    const int b = __shfl_sync(kFull, block, source), first = b * p.block_size;
    if (began_earlier(p, begin, first, lane)) continue;
    bins.clear(p.experts, lane);
    __syncwarp();
    bool fresh = false;
    for (int t = begin; t < end; t += 32) {
      const int s = t + lane < end ? slot_at(p, t + lane) : -1;
      const unsigned inside = __ballot_sync(kFull, s >= first && s - first < p.block_size);
      fresh |= __ballot_sync(kFull, s == first) != 0;
      count<Id, kBytes, kBits>(p, bins, t, least(32, end - t), inside, layer, lane);
    }
    __syncwarp();
    Row* row = static_cast<Row*>(p.rows) + b * p.row_stride + static_cast<int64_t>(layer) * p.experts;
    write_row<Row, kBits>(p, bins, row, fresh, lane);
    __syncwarp();  // the next run clears the bins that this one still reads
  }
}

}  // namespace eldr
