// CUDA's spelling on top of the emulated device: include before a .cu file and compile it with g++.
//   g++ -std=c++17 -include csrc/emu/cuda_emu.h -x c++ csrc/cuda/eldr.cu
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "machine.h"

#define ELDR_EMU 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define ELDR_SHARED(T, name, n)   \
  static const char name##_site = 0; \
  T* const name = static_cast<T*>(emu::shared(&name##_site, sizeof(T) * (n)))
#define ELDR_UNPAREN(...) __VA_ARGS__
#define ELDR_LAUNCH(kernel, grid, block, stream, ...) \
  emu::launch(grid, block, [=]() { ELDR_UNPAREN kernel(__VA_ARGS__); })

#define threadIdx (emu::self->tid)
#define blockIdx (emu::cta->idx)
#define blockDim (emu::block)
#define gridDim (emu::grid)

struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
using cudaStream_t = void*;

inline int cudaGetLastError() { return emu::failed ? 719 : 0; }  // cudaErrorLaunchFailure

namespace emu {
enum Op { op_sync, op_ballot, op_shfl, op_xor, op_max, op_min, op_add };

template <class Fn>
inline uint32_t reduce(unsigned mask, uint32_t value, int op, Fn fn) {
  return collective(mask, value, op, [fn](const uint32_t* v, unsigned m, int) {
    uint32_t r = v[__builtin_ctz(m)];
    for (int l = __builtin_ctz(m) + 1; l < 32; ++l)
      if (m >> l & 1) r = fn(r, v[l]);
    return r;
  });
}

template <class T>
inline T shuffle(unsigned mask, T value, int lane_or_xor, int op) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 8, "32 and 64 bit values");
  uint32_t word[2] = {0, 0};
  std::memcpy(word, &value, sizeof(T));
  for (size_t i = 0; i < sizeof(T) / 4; ++i)
    word[i] = collective(mask, word[i], op, [=](const uint32_t* v, unsigned m, int l) {
      const int from = (op == op_xor ? l ^ lane_or_xor : lane_or_xor) & 31;
      return (m >> from & 1) ? v[from] : 0xA5A5A5A5u;  // undefined on the hardware
    });
  std::memcpy(&value, word, sizeof(T));
  return value;
}
}  // namespace emu

inline void __syncthreads() { emu::barrier(); }
inline void __syncwarp(unsigned mask = ~0u) {
  emu::collective(mask, 0, emu::op_sync, [](const uint32_t*, unsigned, int) { return 0u; });
}
inline unsigned __ballot_sync(unsigned mask, bool p) {
  return emu::collective(mask, p, emu::op_ballot, [](const uint32_t* v, unsigned m, int) {
    uint32_t r = 0;
    for (int l = 0; l < 32; ++l)
      if ((m >> l & 1) && v[l]) r |= 1u << l;
    return r;
  });
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int lane) { return emu::shuffle(mask, v, lane, emu::op_shfl); }
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int bits) { return emu::shuffle(mask, v, bits, emu::op_xor); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::op_max, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::op_min, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::op_add, [](uint32_t a, uint32_t b) { return a + b; });
}

template <class T>
inline T atomicAdd(T* p, T v) {
  emu::preempt();
  const T old = *p;
  *p = old + v;
  return old;
}
inline void __threadfence() { emu::preempt(); }
template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline T __ldg(const T* p) { return *p; }

inline int __ffs(unsigned v) { return v ? __builtin_ctz(v) + 1 : 0; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline float __uint_as_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float __fadd_rn(float a, float b) { return a + b; }  // compile with -ffp-contract=off
inline float __fmul_rn(float a, float b) { return a * b; }
