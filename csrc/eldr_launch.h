// The boundary between bindings and backends: one plain-C launcher per op and backend, raw pointers only.
//
// Bindings (csrc/bindings) check types, shapes and devices and fill these structs; backends (csrc/cpu,
// csrc/cuda) compute. No torch, ATen or c10 type crosses this header, so that a backend can be built, emulated
// or compiled at run time without them.
//
// A launcher returns 0; a positive CUDA error; or ELDR_UNSUPPORTED when it has no kernel for these dtypes
// or shapes (nothing was launched, the caller takes another backend). All strides are in elements.
// Every array is contiguous unless a stride is given. No launcher synchronises or allocates device memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ELDR_UNSUPPORTED (-1)
#define ELDR_CLOSED INT32_MAX  // load of a worker that must not be chosen

typedef enum { ELDR_U8 = 0, ELDR_U16 = 1, ELDR_I32 = 2, ELDR_I64 = 3 } eldr_dtype;

// histograms[b, l, e] = (fresh(b) ? 0 : histograms[b, l, e]) + #{(t, k) : slots[t] / block_size == b, ids[t, l, k] == e}
// fresh(b): some t has slots[t] == b * block_size. Saturates at the dtype's maximum, never wraps.
// Ignored: negative slots (padding), blocks >= num_blocks, ids outside [0, experts).
// CPU: any order of tokens. Devices: the tokens of one block lie within block_size consecutive positions of the
// step, padding allowed between them (what a scheduler produces); otherwise the block's counts are undefined.
typedef struct {
  const void* ids;      // [tokens, layers, top_k], element stride 1 along top_k
  int ids_dtype;        // any eldr_dtype
  int64_t ids_stride_token, ids_stride_layer;
  const int64_t* slots; // [tokens]
  void* histograms;     // [num_blocks, layers, experts], layers and experts dense
  int hist_dtype;       // ELDR_U8 or ELDR_U16
  int64_t hist_stride_block;
  int64_t num_blocks;
  int64_t tokens;
  int layers, top_k, experts;
  int block_size;
} eldr_accumulate_args;

// counts[r, d] = sum over i in [offsets[r], offsets[r + 1]) of histograms[block_ids[i], d],  d = layer * experts + expert
// Block ids outside [0, num_blocks) add nothing; offsets are clamped to [0, num_ids].
// A request's rows times the dtype's maximum stay below 2^31 (the binding refuses it where it can see it).
typedef struct {
  const void* histograms;  // [num_blocks, cells], cells dense
  int hist_dtype;
  int64_t hist_stride_block;
  int64_t num_blocks;
  int64_t cells;             // layers * experts
  const int32_t* block_ids;  // [num_ids]
  int64_t num_ids;
  const int32_t* offsets;    // [requests + 1], ascending
  int requests;
  int32_t* counts;           // [requests, cells]; may be NULL in eldr_decide_args
} eldr_gather_args;

// Scores of counts c[r] against W vectors:
//   scores[r, w] = (sum_d c[r, d] * vectors[w, d] + prior[w]) * scale[r]
//   squares != NULL (centroids): scale[r] = 1 / sqrt(max(sum_d c[r, d]^2 * squares[d], 1e-24)); squares = weight^2
//   tokens  != NULL (survival):  scale[r] = 1 / max(tokens[r] + shrinkage, 1e-12);   prior = shrinkage * <mean, vector>
//   both NULL: scale[r] = 1.   prior == NULL means zeros.
// Summation order is fixed by the backend: the same input gives the same bits, whatever the number of threads.
typedef struct {
  const float* vectors;    // [workers, cells]
  int workers;             // 1..1024
  const float* prior;      // [workers] or NULL
  const float* squares;    // [cells] or NULL
  const int32_t* tokens;   // [requests] or NULL
  float shrinkage;
  float* scores;           // [requests, workers]
} eldr_score_args;

typedef enum { ELDR_RULE_NONE = 0, ELDR_RULE_LEAST_LOAD = 1, ELDR_RULE_LOCALITY_BAND = 2, ELDR_RULE_MARGINAL_COST = 3 } eldr_rule;

// For r = 0, 1, ... in order, workers[r] = the best worker with load[w] != ELDR_CLOSED, or -1 if there is none; then
// load[workers[r]] = min(load + max(cost[r], 0), ELDR_CLOSED - 1). A NaN score counts as -infinity.
//   LEAST_LOAD:    least load; ties: lowest index.
//   LOCALITY_BAND: among {w : s[w] >= max(s) - tau}: least load; ties: highest score, then lowest index.
//   MARGINAL_COST: least c[w]; ties: lowest index. All in float32, each operation rounded (no contraction), in this order:
//       dt   = (c_expert * max(s[w], 0) + c_kv * request_kv[r]) + c_request         (NaN: s[w] = 0)
//       now  = (c_expert * distinct[w] + c_kv * kv[w]) + c_request * n               n = (float)load[w]
//       c[w] = (now + dt) + (hedge * n) * dt                   a NaN counts as +infinity
//     and then distinct[workers[r]] += max(s, 0); kv[workers[r]] += request_kv[r].
typedef struct {
  int rule;
  float tau;                           // LOCALITY_BAND
  float c_expert, c_kv, c_request, hedge;  // MARGINAL_COST
  int32_t* load;                       // [workers]
  const int32_t* cost;                 // [requests]
  float* state;                        // [2, workers]: distinct, kv; MARGINAL_COST only, else NULL
  const float* request_kv;             // [requests]; MARGINAL_COST only, else NULL
  int32_t* chosen;                     // [requests]
} eldr_assign_args;

// gather + score (+ assign when assign.rule != NONE) in one call. gather.counts may be NULL (not wanted).
typedef struct {
  eldr_gather_args gather;
  eldr_score_args score;
  eldr_assign_args assign;
} eldr_decide_args;

int eldr_cpu_accumulate(const eldr_accumulate_args* args);
int eldr_cpu_gather(const eldr_gather_args* args);
int eldr_cpu_score(const int32_t* counts, int requests, int64_t cells, const eldr_score_args* args);
int eldr_cpu_assign(const float* scores, int requests, int workers, const eldr_assign_args* args);
int eldr_cpu_decide(const eldr_decide_args* args);

// CUDA: `stream` is a cudaStream_t. Safe to capture in a CUDA graph and to replay.
int eldr_cuda_accumulate(const eldr_accumulate_args* args, void* stream);
// Scratch of eldr_cuda_decide in bytes (0: shape not supported). The caller zeroes it once; each call leaves it ready
// for the next one of the same or a smaller shape on the same stream.
size_t eldr_cuda_decide_workspace(int requests, int64_t cells, int workers);
int eldr_cuda_decide(const eldr_decide_args* args, void* workspace, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
