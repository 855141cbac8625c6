// Tensors to launcher arguments, the same for every device. Nothing here reads tensor data.
#pragma once

#include <vector>

#include "tensors.h"

namespace eldr {

inline eldr_accumulate_args accumulate_args(const Tensor& ids, const Tensor& slots, int64_t block_size, Tensor& histograms) {
  check_histograms(histograms);
  STD_TORCH_CHECK(ids.dim() == 3, "topk_ids: has ", ids.dim(), " dimensions, expected [T, L, K]");
  STD_TORCH_CHECK(ids.size(1) == histograms.size(1), "topk_ids: ", ids.size(1), " layers, histograms have ", histograms.size(1));
  STD_TORCH_CHECK(ids.numel() == 0 || ids.size(2) <= 1 || ids.stride(2) == 1, "topk_ids: the last dimension must be dense");
  check_tensor("slot_mapping", slots, ScalarType::Long, {ids.size(0)});
  STD_TORCH_CHECK(block_size >= 1 && block_size <= count_limit(histograms), "block_size: ", block_size,
                  " is not in [1, ", count_limit(histograms), "], what the histograms' dtype can count");
  eldr_accumulate_args a{};
  a.ids = ids.const_data_ptr();
  a.ids_dtype = dtype_code("topk_ids", ids);
  a.ids_stride_token = ids.stride(0);
  a.ids_stride_layer = ids.stride(1);
  a.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  a.histograms = histograms.mutable_data_ptr();
  a.hist_dtype = dtype_code("histograms", histograms);
  a.hist_stride_block = histograms.stride(0);
  a.num_blocks = histograms.size(0);
  a.tokens = ids.size(0);
  a.layers = as_int("layers", ids.size(1));
  a.top_k = as_int("top_k", ids.size(2));
  a.experts = as_int("experts", histograms.size(2));
  a.block_size = static_cast<int>(block_size);
  return a;
}

inline eldr_gather_args gather_args(const Tensor& histograms, const Tensor& block_ids, const Tensor& offsets, const OptionalTensor& counts) {
  check_histograms(histograms);
  check_tensor("block_ids", block_ids, ScalarType::Int, {-1});
  check_tensor("offsets", offsets, ScalarType::Int, {-1});
  STD_TORCH_CHECK(offsets.size(0) >= 1, "offsets: empty, expected [R + 1]");
  const int64_t requests = offsets.size(0) - 1, layers = histograms.size(1), experts = histograms.size(2);
  eldr_gather_args a{};
  a.histograms = histograms.const_data_ptr();
  a.hist_dtype = dtype_code("histograms", histograms);
  a.hist_stride_block = histograms.stride(0);
  a.num_blocks = histograms.size(0);
  a.cells = layers * experts;
  a.block_ids = static_cast<const int32_t*>(block_ids.const_data_ptr());
  a.num_ids = block_ids.size(0);
  a.offsets = static_cast<const int32_t*>(offsets.const_data_ptr());
  a.requests = as_int("requests", requests);
  a.counts = const_cast<int32_t*>(optional_data<int32_t>("counts", counts, ScalarType::Int, {requests, layers, experts}));
  return a;
}

inline eldr_score_args score_args(const Tensor& vectors, const OptionalTensor& prior, const OptionalTensor& squares,
                                  const OptionalTensor& tokens, double shrinkage, int64_t requests, int64_t cells, Tensor& scores) {
  check_tensor("vectors", vectors, ScalarType::Float, {-1, cells});
  const int64_t workers = vectors.size(0);
  check_tensor("scores", scores, ScalarType::Float, {requests, workers});
  STD_TORCH_CHECK(workers >= 1 && workers <= 1024, "vectors: ", workers, " workers, expected 1 to 1024");
  STD_TORCH_CHECK(!(squares && tokens), "squares and tokens: expected at most one of them");
  eldr_score_args a{};
  a.vectors = static_cast<const float*>(vectors.const_data_ptr());
  a.workers = static_cast<int>(workers);
  a.prior = optional_data<float>("prior", prior, ScalarType::Float, {workers});
  a.squares = optional_data<float>("squares", squares, ScalarType::Float, {cells});
  a.tokens = optional_data<int32_t>("tokens", tokens, ScalarType::Int, {requests});
  a.shrinkage = static_cast<float>(shrinkage);
  a.scores = static_cast<float*>(scores.mutable_data_ptr());
  return a;
}

// coefficients: empty, [tau], or [expert, kv, request, hedge], by rule.
inline eldr_assign_args assign_args(int64_t rule, const std::vector<double>& coefficients, int64_t requests, int64_t workers,
                                    const OptionalTensor& cost, const OptionalTensor& request_kv, const OptionalTensor& load,
                                    const OptionalTensor& state, const OptionalTensor& chosen) {
  eldr_assign_args a{};
  a.rule = static_cast<int>(rule);
  if (rule == ELDR_RULE_NONE) return a;
  constexpr size_t kCoefficients[] = {0, 0, 1, 4};
  STD_TORCH_CHECK(rule > ELDR_RULE_NONE && rule <= ELDR_RULE_MARGINAL_COST, "rule: ", rule, " is not in [0, 3]");
  STD_TORCH_CHECK(coefficients.size() == kCoefficients[rule], "coefficients: ", coefficients.size(), " given, rule ", rule,
                  " takes ", kCoefficients[rule]);
  STD_TORCH_CHECK(cost && load && chosen, "cost, load and chosen: needed to assign");
  a.cost = optional_data<int32_t>("cost", cost, ScalarType::Int, {requests});
  a.load = const_cast<int32_t*>(optional_data<int32_t>("load", load, ScalarType::Int, {workers}));
  a.chosen = const_cast<int32_t*>(optional_data<int32_t>("chosen", chosen, ScalarType::Int, {requests}));
  if (rule == ELDR_RULE_LOCALITY_BAND) a.tau = static_cast<float>(coefficients[0]);
  if (rule == ELDR_RULE_MARGINAL_COST) {
    STD_TORCH_CHECK(state && request_kv, "state and request_kv: needed by marginal cost");
    a.state = const_cast<float*>(optional_data<float>("state", state, ScalarType::Float, {2, workers}));
    a.request_kv = optional_data<float>("request_kv", request_kv, ScalarType::Float, {requests});
    a.c_expert = static_cast<float>(coefficients[0]);
    a.c_kv = static_cast<float>(coefficients[1]);
    a.c_request = static_cast<float>(coefficients[2]);
    a.hedge = static_cast<float>(coefficients[3]);
  }
  return a;
}

// Everything of `decide`, in the order of its schema.
inline eldr_decide_args decide_args(const Tensor& histograms, const Tensor& block_ids, const Tensor& offsets, const Tensor& vectors,
                                    const OptionalTensor& prior, const OptionalTensor& squares, const OptionalTensor& tokens,
                                    double shrinkage, int64_t rule, const std::vector<double>& coefficients, const OptionalTensor& cost,
                                    const OptionalTensor& request_kv, Tensor& scores, const OptionalTensor& counts,
                                    const OptionalTensor& load, const OptionalTensor& state, const OptionalTensor& chosen) {
  eldr_decide_args a{};
  a.gather = gather_args(histograms, block_ids, offsets, counts);
  a.score = score_args(vectors, prior, squares, tokens, shrinkage, a.gather.requests, a.gather.cells, scores);
  a.assign = assign_args(rule, coefficients, a.gather.requests, a.score.workers, cost, request_kv, load, state, chosen);
  return a;
}

}  // namespace eldr
