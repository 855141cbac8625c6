// The decode pool of eldr.simulation: continuous batching on W workers, in discrete or expected-value
// mode. No Python in here. Times are seconds, all sums over experts and tokens are integers (discrete
// mode), so that the plain-Python reference gives bit-identical times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace eldr {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Log-survival is counted in units of 2^-20, so that a request's removal undoes its arrival exactly.
constexpr double kLogUnit = 1.0 / (1 << 20);

struct Step {  // seconds = base + expert * D + kv * (KV tokens) + request * n; eldr/routing/cost.py
  double base, expert, kv, request;
};

struct Limits {
  int64_t batch, kv_tokens;
};

// Recorded routing. `bits` [tokens, L, words]: experts of one decoded token as a bit set;
// `first`/`length` [N]: a request's decoded tokens; `logs` [N, L * E]: -log(1 - p), expected mode;
// `owners` [P, L, E]: expert-parallel rank of each expert; worker j has placement j mod P.
struct Trace {
  int64_t layers, experts, words, rank_count, placements;
  const uint64_t* bits;
  const int64_t* first;
  const int64_t* length;
  const int32_t* logs;
  const uint8_t* owners;
};

struct Request {
  int64_t id, row, steps, context, done;
  double ready;
  uint64_t order;
};

struct Completion {
  double time;
  int64_t worker, id;
};

struct Totals {  // of the steps that a worker has finished
  double seconds = 0, slowest = 0, kv = 0;
  int64_t steps = 0, tokens = 0;
  std::vector<double> distinct;  // [L]
  std::vector<double> use;       // [L * E], only when tracked
};

struct Worker {
  int64_t placement = 0;
  double now = 0;                 // end of the last step
  double end = 0;                 // end of the running step or run of steps
  int64_t run = 0;                // steps in it; 0 = none runs
  bool alive = true, changed = true;
  int64_t reserved = 0, context = 0;
  std::vector<Request> active;
  std::vector<Request> waiting;   // a heap: earliest ready time first, then order of submission
  std::vector<int64_t> load;      // [L * E] summed logs, expected mode
  std::vector<double> distinct;   // [L] of the running step
  std::vector<uint64_t> read;     // [L * words] experts of the running step, only when tracked
  double slowest = 0;             // sum over layers of the largest rank's distinct experts
  double cost = 0;                // seconds of the running step, without KV growth
  Totals totals;
};

class Pool {
 public:
  Pool(const Trace& trace, const Step& step, const Limits& limits, uint64_t seed, bool expected,
       bool track_use);
  int64_t add_worker(double now);
  int64_t size() const { return static_cast<int64_t>(workers_.size()); }
  const Worker& worker(int64_t w) const { return workers_[static_cast<size_t>(w)]; }
  const Trace& trace() const { return trace_; }
  const Limits& limits() const { return limits_; }
  double clock() const { return clock_; }

  void submit(int64_t w, const Request& request);
  // Finishes every step that ends at or before `until`, starts every step that begins before it.
  const std::vector<Completion>& advance(double until);
  // The worker is gone, and with it what it ran (first) and what waited for it (second).
  void fail(int64_t w, std::vector<int64_t>* running, std::vector<int64_t>* waiting);

 private:
  double next_start(const Worker& w) const;
  void schedule(int64_t index);
  void work(int64_t index, double until);
  void begin(Worker& w);
  void finish(int64_t index, Worker& w);
  void admit(Worker& w);
  void count(Worker& w);
  void record_use(Worker& w) const;
  void expect(Worker& w);
  double slowest(const Worker& w, size_t layer);
  double span(const Worker& w, int64_t steps) const;
  int64_t steps_until(const Worker& w, double when, int64_t most) const;
  void shift(Worker& w, int64_t row, int64_t sign);
  int64_t token(const Request& r) const;

  Trace trace_;
  Step step_;
  Limits limits_;
  uint64_t seed_, submitted_ = 0;
  bool expected_, track_use_;
  double clock_ = 0;
  std::vector<Worker> workers_;
  std::vector<double> next_;      // [W] time of each worker's next event
  std::vector<Completion> done_;
  std::vector<uint64_t> read_;    // [L * words] scratch: experts of the step being counted
  std::vector<uint64_t> masks_;   // [P, R, L * words] experts of each rank, discrete mode
  std::vector<double> mass_;      // [R, E + 1] scratch: distribution of each rank's distinct experts
};

}  // namespace eldr
