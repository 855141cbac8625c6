// decide: gather, score and assign without writing the signatures out; a chunk of counts goes from the rows straight
// into the dot products.
#include <cstdint>

#include "columns.h"

extern "C" int eldr_cpu_decide(const eldr_decide_args* args) {
  using namespace eldr::cpu;
  const eldr_gather_args& g = args->gather;
  score_groups(g.requests, g.cells, args->score, [&g](int r, int64_t column, int width, float* x) {
    int32_t local[kChunk];
    int32_t* counts = g.counts != nullptr ? g.counts + r * g.cells + column : local;
    gather_chunk(g, r, column, width, counts);
    for (int i = 0; i < width; ++i) x[i] = static_cast<float>(counts[i]);
  });
  if (args->assign.rule == ELDR_RULE_NONE) return 0;
  return eldr_cpu_assign(args->score.scores, g.requests, args->score.workers, &args->assign);
}
