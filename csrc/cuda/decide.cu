// Picks and launches the decision kernel for one set of arguments (see decide.cuh).
#include "decide.cuh"

#include <stddef.h>

#include "../eldr_launch.h"
#include "../nvtx_range.h"
#include "host.h"

namespace eldr {
namespace {

constexpr int64_t kMaxCells = 1 << 24;  // cells and chunks are 32-bit in the kernel, with room to spare
constexpr size_t kTickets = 1 + kMaxRequests;
constexpr int kLargeGrid = 264;  // twice the multiprocessors of the widest supported device
constexpr int kLargeGroup = 4;

bool supported(int requests, int64_t cells, int workers) {
  return requests >= 1 && requests <= kMaxRequests && cells >= 1 && cells <= kMaxCells && workers >= 1 &&
         workers <= kMaxWorkers;
}

int chunks_of(int64_t cells, int per_chunk) { return static_cast<int>((cells + per_chunk - 1) / per_chunk); }

template <class Row, bool kVector, int kGroup>
int launch(const DecideParams& p, void* stream) {
  const dim3 grid(p.chunks, (p.requests + kGroup - 1) / kGroup);
  ELDR_LAUNCH((decide<Row, kVector, kGroup>), grid, dim3(kDecideWarps * 32), stream, p);
  return static_cast<int>(cudaGetLastError());
}

// Groups of requests share each vector they read; single requests fill the device sooner.
template <class Row, bool kVector>
int pick_group(const DecideParams& p, void* stream) {
  const int64_t grouped = static_cast<int64_t>(p.chunks) * ((p.requests + kLargeGroup - 1) / kLargeGroup);
  if (grouped >= kLargeGrid) return launch<Row, kVector, kLargeGroup>(p, stream);
  return launch<Row, kVector, 1>(p, stream);
}

template <class Row>
int pick_width(DecideParams p, void* workspace, void* stream) {
  p.chunks = chunks_of(p.cells, Chunk<Row>::kCells);
  p.tickets = static_cast<unsigned*>(workspace);
  p.partial = reinterpret_cast<float*>(p.tickets + kTickets);
  p.norms = p.partial + static_cast<int64_t>(p.requests) * p.chunks * p.workers;
  const bool vector = address(p.rows) % 16 == 0 && p.row_stride * sizeof(Row) % 16 == 0 &&
                      p.cells % Chunk<Row>::kPerLane == 0 && address(p.vectors) % 16 == 0 &&
                      address(p.squares) % 16 == 0;
  return vector ? pick_group<Row, true>(p, stream) : pick_group<Row, false>(p, stream);
}

}  // namespace
}  // namespace eldr

extern "C" size_t eldr_cuda_decide_workspace(int requests, int64_t cells, int workers) {
  using namespace eldr;
  if (!supported(requests, cells, workers)) return 0;
  const size_t chunks = chunks_of(cells, Chunk<uint16_t>::kCells);  // the smaller chunks of the two row types
  return 4 * (kTickets + static_cast<size_t>(requests) * chunks * (static_cast<size_t>(workers) + 1));
}

extern "C" int eldr_cuda_decide(const eldr_decide_args* args, void* workspace, void* stream) {
  using namespace eldr;
  const eldr_gather_args& g = args->gather;
  const eldr_score_args& s = args->score;
  const eldr_assign_args& a = args->assign;
  if (g.requests == 0) return 0;
  if (!supported(g.requests, g.cells, s.workers) || a.rule < ELDR_RULE_NONE || a.rule > ELDR_RULE_MARGINAL_COST)
    return ELDR_UNSUPPORTED;
  ELDR_NVTX_RANGE("launch decide", g.requests);
  DecideParams p{};
  p.rows = g.histograms, p.block_ids = g.block_ids, p.offsets = g.offsets, p.counts = g.counts;
  p.vectors = s.vectors, p.prior = s.prior, p.squares = s.squares, p.tokens = s.tokens, p.scores = s.scores;
  p.load = a.load, p.cost = a.cost, p.state = a.state, p.request_kv = a.request_kv, p.chosen = a.chosen;
  p.row_stride = g.hist_stride_block, p.num_blocks = g.num_blocks, p.num_ids = g.num_ids;
  p.cells = static_cast<int>(g.cells), p.requests = g.requests, p.workers = s.workers, p.rule = a.rule;
  p.shrinkage = s.shrinkage, p.tau = a.tau, p.hedge = a.hedge;
  p.c_expert = a.c_expert, p.c_kv = a.c_kv, p.c_request = a.c_request;
  if (g.hist_dtype == ELDR_U8) return pick_width<uint8_t>(p, workspace, stream);
  if (g.hist_dtype == ELDR_U16) return pick_width<uint16_t>(p, workspace, stream);
  return ELDR_UNSUPPORTED;
}
