// What every kernel here shares. Device code only, so that NVRTC can compile it without host headers.
#pragma once
#if defined(__CUDACC_RTC__)  // NVRTC: no standard library
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long long int64_t;
#else
#include <cstdint>
#endif
#if !defined(ELDR_EMU)
#define ELDR_SHARED(T, name, n) __shared__ T name[n]
#endif

namespace eldr {

constexpr unsigned kFull = 0xffffffffu;

// 16 bytes read by one LDG.128; the address must be 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

}  // namespace eldr
