// The ops on CPU tensors. Schemas are declared in Python (eldr/kernels/library.py), which serves them by plain torch
// when this extension is absent.
#include "arguments.h"

namespace eldr {
namespace {

void accumulate_hits(Tensor ids, Tensor slots, int64_t block_size, Tensor histograms) {
  const eldr_accumulate_args a = accumulate_args(ids, slots, block_size, histograms);
  for (int64_t t = 0; t < a.tokens; ++t) {
    STD_TORCH_CHECK(a.slots[t] >= -1 && a.slots[t] < a.num_blocks * block_size, "slot_mapping: slot ", a.slots[t],
                    " of token ", t, " is not in [-1, ", a.num_blocks * block_size, ")");
  }
  eldr_cpu_accumulate(&a);
}

// Block ids and offsets are host data here: refuse what the devices can only ignore.
void check_blocks(const eldr_gather_args& a, int64_t limit) {
  for (int r = 0; r < a.requests; ++r) {
    const int64_t begin = a.offsets[r], end = a.offsets[r + 1];
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= a.num_ids, "offsets: [", begin, ", ", end, ") of request ", r,
                    " is not a range within the ", a.num_ids, " block ids");
    STD_TORCH_CHECK((end - begin) * limit <= INT32_MAX, "offsets: request ", r, " has ", end - begin,
                    " blocks, its counts could pass int32");
    for (int64_t i = begin; i < end; ++i) {
      STD_TORCH_CHECK(a.block_ids[i] >= 0 && a.block_ids[i] < a.num_blocks, "block_ids: ", a.block_ids[i],
                      " at position ", i, " is not in [0, ", a.num_blocks, ")");
    }
  }
}

void gather_signatures(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor counts) {
  const eldr_gather_args a = gather_args(histograms, block_ids, offsets, counts);
  check_blocks(a, count_limit(histograms));
  eldr_cpu_gather(&a);
}

void score(Tensor counts, Tensor vectors, OptionalTensor prior, OptionalTensor squares, OptionalTensor tokens, double shrinkage,
           Tensor scores) {
  check_tensor("counts", counts, ScalarType::Int, {-1, -1, -1});
  const int64_t requests = counts.size(0), cells = counts.size(1) * counts.size(2);
  const eldr_score_args a = score_args(vectors, prior, squares, tokens, shrinkage, requests, cells, scores);
  eldr_cpu_score(static_cast<const int32_t*>(counts.const_data_ptr()), as_int("requests", requests), cells, &a);
}

void assign(Tensor scores, int64_t rule, std::vector<double> coefficients, Tensor cost, OptionalTensor request_kv, Tensor load,
            OptionalTensor state, Tensor chosen) {
  check_tensor("scores", scores, ScalarType::Float, {-1, -1});
  const int64_t requests = scores.size(0), workers = scores.size(1);
  STD_TORCH_CHECK(rule != ELDR_RULE_NONE && workers > 0, "rule: 0 assigns nothing, or no worker");
  const eldr_assign_args a = assign_args(rule, coefficients, requests, workers, cost, request_kv, load, state, chosen);
  eldr_cpu_assign(static_cast<const float*>(scores.const_data_ptr()), as_int("requests", requests), as_int("workers", workers), &a);
}

void decide(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor vectors, OptionalTensor prior, OptionalTensor squares,
            OptionalTensor tokens, double shrinkage, int64_t rule, std::vector<double> coefficients, OptionalTensor cost,
            OptionalTensor request_kv, Tensor scores, OptionalTensor counts, OptionalTensor load, OptionalTensor state,
            OptionalTensor chosen) {
  const eldr_decide_args a = decide_args(histograms, block_ids, offsets, vectors, prior, squares, tokens, shrinkage, rule, coefficients,
                                         cost, request_kv, scores, counts, load, state, chosen);
  check_blocks(a.gather, count_limit(histograms));
  eldr_cpu_decide(&a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eldr, CPU, m) {
  m.impl("accumulate_hits", TORCH_BOX(&accumulate_hits));
  m.impl("gather_signatures", TORCH_BOX(&gather_signatures));
  m.impl("score", TORCH_BOX(&score));
  m.impl("assign", TORCH_BOX(&assign));
  m.impl("decide", TORCH_BOX(&decide));
}

}  // namespace eldr
