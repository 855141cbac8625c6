// What a test may set and read in an emulated build: the seed, blocks in flight, the failure message.
#include <cstdint>

#include "machine.h"

extern "C" void eldr_emu_reset(uint64_t seed, unsigned resident) {
  emu::seed = seed * 2 + 1;  // the generator's state must not be zero
  for (int i = 0; i < 8; ++i) emu::draw();
  emu::resident = resident ? resident : 1;
  emu::failed = false;
  emu::message.clear();
}

extern "C" const char* eldr_emu_message() { return emu::message.c_str(); }
