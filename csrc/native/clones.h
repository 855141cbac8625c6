// ELDR_CLONES before a function: GCC compiles it for several instruction sets, and the fastest that
// the processor has is taken when the library is loaded.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ELDR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ELDR_CLONES
#endif
