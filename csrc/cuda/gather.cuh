// counts[d] = sum over a request's blocks of rows[block, d], for one chunk of cells, in shared memory.
//
// The warps of a thread block share the request's list; a lane owns 16 bytes of every row (one LDG.128), adds
// them up in registers and then adds its sums to the shared counts. Integers: the order does not matter.
#pragma once
#include "decide_params.cuh"

namespace eldr {

// Cells of one lane, and of one chunk.
template <class Row>
struct Chunk {
  static constexpr int kPerLane = 16 / sizeof(Row);
  static constexpr int kCells = 32 * kPerLane;
  static constexpr int kRows = 256;  // rows a lane may add between two flushes: 255 * 256 < 2^16
};

// A lane's running sums of 16-byte pieces. For uint8 cells two 16-bit sums share a register.
template <class Row>
struct LaneSum;

template <>
struct LaneSum<uint8_t> {
  uint32_t even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void add(uint4 v) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      even[j] += w[j] & 0x00ff00ffu;
      odd[j] += w[j] >> 8 & 0x00ff00ffu;
    }
  }
  __device__ __forceinline__ uint32_t at(int i) const {
    return (i & 1 ? odd : even)[i / 4] >> (i & 2 ? 16 : 0) & 0xffffu;
  }
};

template <>
struct LaneSum<uint16_t> {
  uint32_t sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  __device__ __forceinline__ void add(uint4 v) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[2 * j] += w[j] & 0xffffu;
      sum[2 * j + 1] += w[j] >> 16;
    }
  }
  __device__ __forceinline__ uint32_t at(int i) const { return sum[i]; }
};

// Where the count of cell c of a chunk lies: lanes that flush side by side hit different banks.
template <class Row, bool kVector>
__device__ __forceinline__ int place(int c) {
  constexpr int kPerLane = Chunk<Row>::kPerLane;
  return kVector ? c % kPerLane * 32 + c / kPerLane : c;
}

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

constexpr int kBatch = 8;  // rows in flight per lane

// The block at position `at` of the list; -1 past its end and for blocks that do not exist.
__device__ __forceinline__ int block_at(const DecideParams& p, int64_t at, int64_t stop) {
  const int block = at < stop ? p.block_ids[at] : -1;
  return block < p.num_blocks ? block : -1;
}

// Blocks base, base + kDecideWarps, ... before stop, 16 bytes per lane and row. All loads of a batch are issued
// before the first is used: one trip to memory per batch, not per row.
template <class Row>
__device__ __forceinline__ void add_rows(const DecideParams& p, const Row* column, int64_t base, int64_t stop,
                                         uint32_t* counts, int lane) {
  LaneSum<Row> sum;
#pragma unroll 1
  for (int64_t i = base; i < stop; i += kBatch * kDecideWarps) {
    int block[kBatch];
    uint4 piece[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) block[j] = block_at(p, i + j * kDecideWarps, stop);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      piece[j] = uint4{0, 0, 0, 0};
      if (block[j] >= 0) piece[j] = load16(column + block[j] * p.row_stride);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum.add(piece[j]);
  }
#pragma unroll
  for (int j = 0; j < Chunk<Row>::kPerLane; ++j) atomicAdd(counts + j * 32 + lane, sum.at(j));
}

// The same where rows do not start at multiples of 16 bytes: lane l owns cells l, l + 32, ...
template <class Row>
__device__ __forceinline__ void add_cells(const DecideParams& p, const Row* chunk, int cells, int64_t base,
                                          int64_t stop, uint32_t* counts, int lane) {
  for (int c = lane; c < cells; c += 32) {
    uint32_t sum = 0;
#pragma unroll 4
    for (int64_t i = base; i < stop; i += kDecideWarps) {
      const int block = block_at(p, i, stop);
      if (block >= 0) sum += chunk[block * p.row_stride + c];
    }
    atomicAdd(counts + c, sum);
  }
}

// Adds request r's rows to counts [Chunk::kCells]; the caller cleared them, and synchronises before and after.
template <class Row, bool kVector>
__device__ __forceinline__ void gather(const DecideParams& p, int r, int first, uint32_t* counts, int warp,
                                       int lane) {
  const int64_t begin = clamp(p.offsets[r], p.num_ids), end = clamp(p.offsets[r + 1], p.num_ids);
  const Row* chunk = static_cast<const Row*>(p.rows) + first;
  constexpr int64_t kStride = static_cast<int64_t>(kDecideWarps) * Chunk<Row>::kRows;
  for (int64_t base = begin + warp; base < end; base += kStride) {
    const int64_t stop = base + kStride < end ? base + kStride : end;
    const int own = lane * Chunk<Row>::kPerLane;
    if (!kVector)
      add_cells(p, chunk, least(Chunk<Row>::kCells, p.cells - first), base, stop, counts, lane);
    else if (first + own < p.cells)
      add_rows(p, chunk + own, base, stop, counts, lane);
  }
}

}  // namespace eldr
