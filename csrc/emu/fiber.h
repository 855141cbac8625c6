// One fiber per emulated CUDA thread: a stack and a register switch (x86-64, System V).
//
// A fiber runs until it yields to the scheduler; nothing preempts it, so every interleaving the scheduler
// produces is repeatable from its seed. Under AddressSanitizer the switches are announced, so that its
// stack bookkeeping follows.
#pragma once
#if !defined(__x86_64__)
#error "the CUDA emulation switches stacks with x86-64 code; skip it on other machines"
#endif
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers on the running stack, publishes it in *from, resumes `to`.
extern "C" void eldr_emu_switch(void** from, void* to);
__asm__(R"(
.text
.weak eldr_emu_switch
eldr_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emu {

constexpr size_t kStack = 64 << 10;

struct Fiber {
  void* sp = nullptr;
  char* stack = nullptr;  // kStack bytes, reused from launch to launch
};

struct Host {  // the scheduler's own context
  void* sp = nullptr;
  const void* stack = nullptr;
  size_t size = 0;
};
inline Host host;

inline void make(Fiber& f, void (*entry)()) {
  if (!f.stack) f.stack = static_cast<char*>(std::aligned_alloc(64, kStack));
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(f.stack, kStack);
#endif
  void** top = reinterpret_cast<void**>(f.stack + kStack);
  *--top = nullptr;  // the caller's frame that never was; keeps the stack 16-byte aligned
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.sp = top;
}

inline void enter(Fiber& f) {  // scheduler -> fiber, returns at its next yield
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, f.stack, kStack);
  eldr_emu_switch(&host.sp, f.sp);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  eldr_emu_switch(&host.sp, f.sp);
#endif
}

inline void leave(Fiber& f) {  // fiber -> scheduler
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, host.stack, host.size);
  eldr_emu_switch(&f.sp, host.sp);
  __sanitizer_finish_switch_fiber(fake, &host.stack, &host.size);
#else
  eldr_emu_switch(&f.sp, host.sp);
#endif
}

inline void started() {  // first thing a fresh fiber does
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &host.stack, &host.size);
#endif
}

}  // namespace emu
