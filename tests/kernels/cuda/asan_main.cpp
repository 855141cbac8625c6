// Runs both launchers on heap buffers of exactly the size they may touch, under AddressSanitizer: odd shapes,
// ids, slots and block ids outside their ranges. With an argument the last row is one element too short.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "eldr_launch.h"

static unsigned state = 7;
static int draw(int low, int high) {  // in [low, high)
  state = state * 1664525u + 1013904223u;
  return low + static_cast<int>((state >> 8) % static_cast<unsigned>(high - low));
}

static int accumulate(bool too_short) {
  const int tokens = 77, layers = 9, top_k = 6, experts = 61, block_size = 16, blocks = 8;
  std::vector<int> ids(tokens * layers * top_k);
  for (int& id : ids) id = draw(-2, experts + 9);
  std::vector<int64_t> slots(tokens, -1);
  for (int t = 0; t < 60; ++t) slots[t] = 3 * block_size + 5 + t;  // blocks 3..7, from mid-block
  slots[70] = blocks * block_size, slots[71] = int64_t(1) << 40;
  std::vector<uint8_t> rows(blocks * layers * experts - too_short, 3);
  const eldr_accumulate_args args{ids.data(), ELDR_I32, layers * top_k, top_k, slots.data(), rows.data(), ELDR_U8,
                                  layers * experts, blocks, tokens, layers, top_k, experts, block_size};
  return eldr_cuda_accumulate(&args, nullptr);
}

static int decide(int cells, int requests, int workers, int dtype) {
  const int blocks = 5, each = 7, bytes = dtype == ELDR_U16 ? 2 : 1;
  std::vector<uint8_t> rows(blocks * cells * bytes, 2);
  std::vector<int32_t> ids(requests * each), offsets(requests + 1), counts(requests * cells), load(workers, 1);
  std::vector<int32_t> cost(requests, 1), chosen(requests), tokens(requests, 9);
  for (int& id : ids) id = draw(-1, blocks + 1);
  for (int r = 0; r <= requests; ++r) offsets[r] = r * each;
  std::vector<float> vectors(workers * cells, 0.5f), prior(workers, 0.1f), scores(requests * workers);
  std::vector<float> state_of(2 * workers), kv(requests, 1.0f);
  std::vector<uint8_t> workspace(eldr_cuda_decide_workspace(requests, cells, workers));
  const eldr_decide_args args{
      {rows.data(), dtype, cells, blocks, cells, ids.data(), requests * each, offsets.data(), requests, counts.data()},
      {vectors.data(), workers, prior.data(), nullptr, tokens.data(), 4.0f, scores.data()},
      {ELDR_RULE_MARGINAL_COST, 0, 1, 1, 1, 1, load.data(), cost.data(), state_of.data(), kv.data(), chosen.data()}};
  return eldr_cuda_decide(&args, workspace.data(), nullptr);
}

int main(int argc, char**) {
  std::printf("accumulate %d\n", accumulate(argc > 1));
  int code = 0;
  code |= decide(61, 3, 5, ELDR_U8);
  code |= decide(3 * 64 + 2, 2, 33, ELDR_U16);
  code |= decide(640, 2, 3, ELDR_U8);
  code |= decide(264, 9, 2, ELDR_U16);
  code |= decide(33 * 512, 33, 2, ELDR_U8);  // groups of requests
  std::printf("decide %d\n", code);
  return code;
}
