// The emulated device: thread blocks made of fibers, run by a scheduler that draws its order from a seed.
//
// Several blocks are resident at once, so that protocols between blocks (tickets) meet real interleavings.
// Shared memory is filled with a pattern before a block runs: code that counts on zeros fails. Barriers and
// warp collectives are checked: a lane outside its own mask, lanes that name different masks or different
// operations, and barriers that can never complete end the launch with a message, not with a hang.
// Some warps are slow, so that a race between fast and slow ones shows.
// What is not modelled: the memory model. Stores are seen at once and in order: a missing fence passes, and so does
// a missing __syncwarp beside another collective of the same lanes, which orders them here.
#pragma once
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emu {

enum class State { ready, barrier, collective, done };

struct Thread {
  Fiber fiber;
  dim3 tid;
  int warp = 0, lane = 0;
  State state = State::ready;
  uint32_t out = 0;  // result of the collective this thread waited for
};

struct Gathering {  // a collective that lanes of one warp have begun; kept at its mask's lowest lane
  unsigned mask = 0, arrived = 0;
  int op = 0;
  uint32_t value[32];
};

struct Cta {
  dim3 idx;
  std::vector<Thread> threads;
  std::vector<Gathering> gathering;  // 32 per warp
  std::vector<char> slow;            // per warp: gets a quarter of the turns
  size_t live = 0, waiting = 0;      // threads not done; threads at the barrier
  std::map<const void*, std::unique_ptr<char[]>> shared;
};

inline Cta* cta = nullptr;  // the running thread's block, and the thread
inline Thread* self = nullptr;
inline dim3 grid, block;
inline const std::function<void()>* kernel = nullptr;
inline uint64_t seed = 1;
inline unsigned resident = 3;  // thread blocks in flight at once
inline bool failed = false;
inline std::string message;

inline uint64_t draw() {  // xorshift64*
  seed ^= seed >> 12;
  seed ^= seed << 25;
  seed ^= seed >> 27;
  return seed * 0x2545F4914F6CDD1DULL;
}

inline void yield() { leave(self->fiber); }

inline void fail(const std::string& what) {
  char where[96];
  std::snprintf(where, sizeof where, " (block %u,%u thread %u)", cta->idx.x, cta->idx.y, self->tid.x);
  if (!failed) message = what + where;
  failed = true;
  for (;;) yield();
}

inline void preempt() {  // a point where the hardware could let another thread go first
  if ((draw() & 3) == 0) yield();
}

inline void barrier() {
  self->state = State::barrier;
  cta->waiting++;
  yield();
}

// Every lane of `mask` must arrive with the same mask and operation; the last one computes all results.
template <class Fn>
inline uint32_t collective(unsigned mask, uint32_t value, int op, Fn fn) {
  const int lane = self->lane;
  if (!(mask >> lane & 1)) fail("a lane is not in the mask of its own warp collective");
  Gathering& g = cta->gathering[self->warp * 32 + __builtin_ctz(mask)];
  if (g.arrived == 0) {
    g.mask = mask;
    g.op = op;
  } else if (g.mask != mask || g.op != op) {
    fail("lanes of one warp meet in different collectives or with different masks");
  }
  g.value[lane] = value;
  g.arrived |= 1u << lane;
  if (g.arrived != g.mask) {
    self->state = State::collective;
    yield();
    return self->out;
  }
  g.arrived = 0;
  Thread* warp = &cta->threads[self->warp * 32];
  for (int l = 0; l < 32; ++l)
    if (mask >> l & 1) {
      warp[l].out = fn(g.value, mask, l);
      warp[l].state = State::ready;
    }
  preempt();
  return self->out;
}

inline void* shared(const void* site, size_t bytes) {
  auto& memory = cta->shared[site];
  if (!memory) {
    memory.reset(new char[bytes]);
    std::memset(memory.get(), 0xA5, bytes);
  }
  return memory.get();
}

inline void entry() {
  started();
  (*kernel)();
  self->state = State::done;
  cta->live--;
  for (;;) yield();
}

inline std::vector<Fiber>& stacks() {  // free stacks, kept between launches
  static std::vector<Fiber> pool;
  return pool;
}

inline void begin(Cta& c, unsigned long index) {
  c.idx = dim3(index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
  const size_t n = static_cast<size_t>(block.x) * block.y * block.z;
  c.threads.assign(n, Thread());
  c.gathering.assign((n + 31) / 32 * 32, Gathering());
  c.slow.assign((n + 31) / 32, 0);
  for (char& slow : c.slow) slow = draw() % 4 == 0;
  c.live = n;
  c.waiting = 0;
  c.shared.clear();
  for (size_t i = 0; i < n; ++i) {
    Thread& t = c.threads[i];
    if (!stacks().empty()) {
      t.fiber = stacks().back();
      stacks().pop_back();
    }
    make(t.fiber, entry);
    t.tid = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    t.warp = static_cast<int>(i / 32);
    t.lane = static_cast<int>(i % 32);
  }
}

inline void retire(Cta& c) {
  for (Thread& t : c.threads) stacks().push_back(t.fiber);
  c.threads.clear();
}

inline void sweep(Cta& c) {  // ready threads once each, in an order drawn anew; of slow warps, sometimes
  static std::vector<int> order;
  order.clear();
  bool ready = false;
  for (size_t first = 0; first < c.threads.size(); first += 32) {
    const bool turn = !c.slow[first / 32] || draw() % 4 == 0;
    for (size_t i = first; i < first + 32 && i < c.threads.size(); ++i) {
      if (c.threads[i].state != State::ready) continue;
      ready = true;
      if (turn) order.push_back(static_cast<int>(i));
    }
  }
  if (!ready) {
    if (c.waiting != c.live) {
      message = "deadlock: threads wait at a barrier or a warp collective that others never reach";
      failed = true;
      return;
    }
    for (Thread& t : c.threads)
      if (t.state == State::barrier) t.state = State::ready;
    c.waiting = 0;
    return;
  }
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
  cta = &c;
  for (int i : order) {
    self = &c.threads[i];
    enter(self->fiber);
    if (failed) return;
  }
}

inline void launch(dim3 g, dim3 b, const std::function<void()>& body) {
  grid = g;
  block = b;
  kernel = &body;
  const unsigned long total = static_cast<unsigned long>(g.x) * g.y * g.z;
  unsigned long next = 0;
  std::vector<std::unique_ptr<Cta>> flight;
  while (!failed && (next < total || !flight.empty())) {
    while (next < total && flight.size() < resident) {
      flight.emplace_back(new Cta());
      begin(*flight.back(), next++);
    }
    const size_t i = draw() % flight.size();
    sweep(*flight[i]);
    if (flight[i]->live == 0) {
      retire(*flight[i]);
      flight.erase(flight.begin() + static_cast<long>(i));
    }
  }
  for (auto& c : flight) retire(*c);
}

}  // namespace emu
