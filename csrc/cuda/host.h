// What the launchers share on the host side.
#pragma once
#include <stdint.h>
#if !defined(ELDR_EMU)
#include <cuda_runtime.h>
#define ELDR_UNPAREN(...) __VA_ARGS__
#define ELDR_LAUNCH(kernel, grid, block, stream, ...) \
  ELDR_UNPAREN kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif

namespace eldr {

inline uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace eldr
