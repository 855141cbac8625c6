// decide: gather, score and assign without writing the signatures out; a chunk of counts goes from the rows straight
// into the dot products.
#include <cstdint>
#include <vector>

#include "columns.h"

namespace {

using namespace eldr::cpu;

// One (request, chunk): its counts, then its partial dots; returns its share of the squared norm.
float decide_chunk(const eldr_decide_args& args, int request, int64_t column, float* dots) {
  const eldr_gather_args& g = args.gather;
  const auto width = static_cast<int>(std::min<int64_t>(kChunk, g.cells - column));
  int32_t local[kChunk];
  int32_t* counts = g.counts != nullptr ? g.counts + request * g.cells + column : local;
  gather_chunk(g, request, column, width, counts);
  float x[kChunk];
  for (int i = 0; i < width; ++i) x[i] = static_cast<float>(counts[i]);
  return score_chunk(x, g.cells, column, width, args.score, dots);
}

}  // namespace

extern "C" int eldr_cpu_decide(const eldr_decide_args* args) {
  const eldr_gather_args& g = args->gather;
  const eldr_score_args& s = args->score;
  const int64_t chunks = chunks_of(g.cells), items = g.requests * chunks;
  std::vector<float> dots(static_cast<size_t>(items * s.workers)), norms(static_cast<size_t>(items));
#pragma omp parallel for schedule(dynamic, 1) if (items > 1)
  for (int64_t item = 0; item < items; ++item) {
    const auto request = static_cast<int>(item / chunks);
    norms[item] = decide_chunk(*args, request, item % chunks * kChunk, dots.data() + item * s.workers);
  }
  for (int r = 0; r < g.requests; ++r) {
    finish_scores(dots.data() + r * chunks * s.workers, norms.data() + r * chunks, chunks, r, s);
  }
  if (args->assign.rule == ELDR_RULE_NONE) return 0;
  return eldr_cpu_assign(s.scores, g.requests, s.workers, &args->assign);
}
