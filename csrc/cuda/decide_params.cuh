// The decision's arguments as every part of the kernel sees them (see decide.cuh).
#pragma once
#include "common.cuh"

namespace eldr {

constexpr int kDecideWarps = 16;
constexpr int kMaxWorkers = 1024;
constexpr int kMaxRequests = 1024;

struct DecideParams {
  // gather
  const void* rows;          // [num_blocks, cells] of Row
  const int32_t* block_ids;  // [num_ids]
  const int32_t* offsets;    // [requests + 1]
  int32_t* counts;           // [requests, cells], or null
  // score
  const float* vectors;   // [workers, cells]
  const float* prior;     // [workers], or null
  const float* squares;   // [cells], or null
  const int32_t* tokens;  // [requests], or null
  float* scores;          // [requests, workers]
  // assign
  int32_t* load;            // [workers]
  const int32_t* cost;      // [requests]
  float* state;             // [2, workers], or null
  const float* request_kv;  // [requests], or null
  int32_t* chosen;          // [requests]
  // workspace
  unsigned* tickets;  // [1 + groups], zero between calls: finished groups, then finished chunks of each group
  float* partial;     // [requests, chunks, workers]
  float* norms;       // [requests, chunks]

  int64_t row_stride, num_blocks, num_ids;
  int cells, chunks, requests, workers, rule;
  float shrinkage, tau, c_expert, c_kv, c_request, hedge;
};

}  // namespace eldr
