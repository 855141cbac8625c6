// Tensors to launcher arguments, the same for every device. Nothing here reads tensor data.
#pragma once

#include "tensors.h"

namespace eldr {

inline eldr_accumulate_args accumulate_args(const Tensor& ids, const Tensor& slots, int64_t block_size, Tensor& histograms) {
  check_histograms(histograms);
  STD_TORCH_CHECK(ids.dim() == 3, "topk_ids: has ", ids.dim(), " dimensions, expected [T, L, K]");
  STD_TORCH_CHECK(ids.size(1) == histograms.size(1), "topk_ids: ", ids.size(1), " layers, histograms have ", histograms.size(1));
  STD_TORCH_CHECK(ids.size(2) <= 1 || ids.stride(2) == 1, "topk_ids: the last dimension must be dense");
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

}  // namespace eldr
