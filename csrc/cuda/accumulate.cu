// Picks and launches the accumulate kernel for one set of arguments (see accumulate.cuh).
#include "accumulate.cuh"

#include "../eldr_launch.h"
#include "../nvtx_range.h"
#include "host.h"

namespace eldr {
namespace {

// 16-byte id loads (8 where a token has only 8 bytes of them) need every (token, layer) to start on such a boundary.
bool aligned(const eldr_accumulate_args& a, int id_bytes, int bytes) {
  return a.top_k * id_bytes % bytes == 0 && address(a.ids) % bytes == 0 &&
         a.ids_stride_token * id_bytes % bytes == 0 && a.ids_stride_layer * id_bytes % bytes == 0;
}

template <class Id, class Row, int kBits, int kBytes>
int launch(const AccumulateParams& p, void* stream) {
  const dim3 grid((p.tokens + 31) / 32, (p.layers + kAccumulateWarps - 1) / kAccumulateWarps);
  ELDR_LAUNCH((accumulate<Id, Row, kBits, kBytes>), grid, dim3(kAccumulateWarps * 32), stream, p);
  return static_cast<int>(cudaGetLastError());
}

template <class Id, int kBytes>
int pick_row(const eldr_accumulate_args& a, const AccumulateParams& p, void* stream) {
  if (a.hist_dtype == ELDR_U16) return launch<Id, uint16_t, 16, kBytes>(p, stream);
  if (a.block_size * a.top_k <= 255) return launch<Id, uint8_t, 8, kBytes>(p, stream);
  return launch<Id, uint8_t, 16, kBytes>(p, stream);
}

template <class Id, int kWide>
int pick_width(const eldr_accumulate_args& a, const AccumulateParams& p, void* stream) {
  constexpr int kNarrow = sizeof(Id);
  if (aligned(a, kNarrow, kWide)) return pick_row<Id, kWide>(a, p, stream);
  return pick_row<Id, kNarrow>(a, p, stream);
}

bool supported(const eldr_accumulate_args& a) {
  return a.experts >= 1 && a.experts <= kMaxExperts && a.top_k >= 1 && a.block_size >= 1 &&
         static_cast<int64_t>(a.block_size) * a.top_k <= 65535 && a.layers <= 65535 * kAccumulateWarps &&
         a.tokens <= INT32_MAX - 65536 && a.num_blocks <= INT32_MAX / a.block_size &&
         (a.hist_dtype == ELDR_U8 || a.hist_dtype == ELDR_U16);
}

}  // namespace
}  // namespace eldr

extern "C" int eldr_cuda_accumulate(const eldr_accumulate_args* args, void* stream) {
  using namespace eldr;
  const eldr_accumulate_args& a = *args;
  if (!supported(a)) return ELDR_UNSUPPORTED;
  if (a.tokens <= 0 || a.layers <= 0) return 0;
  ELDR_NVTX_RANGE("launch accumulate", a.tokens);
  const int row_bytes = a.hist_dtype == ELDR_U16 ? 2 : 1;
  const bool words = a.experts * row_bytes % 4 == 0 && a.hist_stride_block * row_bytes % 4 == 0 &&
                     address(a.histograms) % 4 == 0;
  const AccumulateParams p{a.ids, a.slots, a.histograms, a.ids_stride_token, a.ids_stride_layer,
                           a.hist_stride_block, static_cast<int>(a.tokens), a.layers, a.top_k, a.experts,
                           a.block_size, static_cast<int>(a.num_blocks * a.block_size), words};
  switch (a.ids_dtype) {
    case ELDR_U8: return pick_width<uint8_t, 8>(a, p, stream);
    case ELDR_U16: return pick_width<uint16_t, 16>(a, p, stream);
    case ELDR_I32: return pick_width<int32_t, 16>(a, p, stream);
    case ELDR_I64: return pick_row<int64_t, 8>(a, p, stream);
    default: return ELDR_UNSUPPORTED;
  }
}
