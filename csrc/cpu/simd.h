// Function multiversioning without ifuncs: a body is written once, always inlined, and compiled twice, for the
// baseline and for AVX2; the caller picks by what the running CPU has. Other architectures get the baseline only.
#pragma once

#include <cstdlib>
#include <cstring>

#define ELDR_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && !defined(ELDR_PORTABLE_ONLY)
#define ELDR_HAS_AVX2_BUILD 1
#define ELDR_TARGET_AVX2 __attribute__((target("avx2,fma,bmi,bmi2")))
#else
#define ELDR_HAS_AVX2_BUILD 0
#endif

namespace eldr::cpu {

// True when the AVX2 versions may run. ELDR_CPU=portable switches them off (tests compare both).
inline bool use_avx2() {
#if ELDR_HAS_AVX2_BUILD
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                __builtin_cpu_supports("bmi2");
  const char* wish = std::getenv("ELDR_CPU");
  return supported && !(wish && std::strcmp(wish, "portable") == 0);
#else
  return false;
#endif
}

}  // namespace eldr::cpu
