// What every binding shares: checks that name the argument, its value and what was expected. The Python launchers
// check more kindly; these keep a direct torch.ops call from reading or writing out of bounds.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

#include "../eldr_launch.h"

namespace eldr {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline int dtype_code(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Byte: return ELDR_U8;
    case ScalarType::UInt16: return ELDR_U16;
    case ScalarType::Int: return ELDR_I32;
    case ScalarType::Long: return ELDR_I64;
    default: STD_TORCH_CHECK(false, name, ": expected uint8, uint16, int32 or int64"); return -1;
  }
}

// Sizes as expected, -1 for any; row-major and dense.
inline void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": unexpected dtype");
  STD_TORCH_CHECK(tensor.dim() == static_cast<int64_t>(sizes.size()), name, ": has ", tensor.dim(),
                  " dimensions, expected ", sizes.size());
  int64_t d = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size < 0 || tensor.size(d) == size, name, ": dimension ", d, " is ", tensor.size(d), ", expected ", size);
    ++d;
  }
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": must be contiguous");
}

inline void check_histograms(const Tensor& histograms) {
  const auto dtype = histograms.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Byte || dtype == ScalarType::UInt16, "histograms: expected uint8 or uint16");
  STD_TORCH_CHECK(histograms.dim() == 3, "histograms: has ", histograms.dim(), " dimensions, expected [num_blocks, L, E]");
  const int64_t layers = histograms.size(1), experts = histograms.size(2);
  STD_TORCH_CHECK(histograms.stride(2) == 1 && (layers == 1 || histograms.stride(1) == experts),
                  "histograms: a block's row [L, E] must be dense");
  STD_TORCH_CHECK(histograms.size(0) <= 1 || histograms.stride(0) >= layers * experts, "histograms: rows overlap");
}

inline int64_t count_limit(const Tensor& histograms) {
  return histograms.scalar_type() == ScalarType::Byte ? 255 : 65535;
}

template <typename T>
const T* optional_data(const char* name, const OptionalTensor& tensor, ScalarType dtype, std::initializer_list<int64_t> sizes) {
  if (!tensor) return nullptr;
  check_tensor(name, *tensor, dtype, sizes);
  return static_cast<const T*>(tensor->const_data_ptr());
}

inline int as_int(const char* name, int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), name, ": ", value, " does not fit an int");
  return static_cast<int>(value);
}

}  // namespace eldr
