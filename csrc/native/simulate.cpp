// See simulate.h. The rules are those of eldr/simulation/reference.py, which must match bit for bit.
#include "simulate.h"

#include <algorithm>
#include <cmath>

namespace eldr {
namespace {

// splitmix64's finaliser: a stateless hash, so that a draw depends on (seed, request, token) only.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

bool later(const Request& a, const Request& b) {
  return a.ready != b.ready ? a.ready > b.ready : a.order > b.order;
}

int64_t need(const Request& r) { return r.context + r.steps; }

}  // namespace

Pool::Pool(const Trace& trace, const Step& step, const Limits& limits, uint64_t seed, bool expected,
           bool track_use)
    : trace_(trace), step_(step), limits_(limits), seed_(seed), expected_(expected),
      track_use_(track_use), read_(static_cast<size_t>(trace.layers * trace.words)) {
  if (trace.rank_count == 1) return;
  if (expected) {
    mass_.resize(static_cast<size_t>(trace.rank_count * (trace.experts + 1)));
    return;
  }
  const size_t width = read_.size();
  masks_.assign(static_cast<size_t>(trace.placements * trace.rank_count) * width, 0);
  for (int64_t p = 0; p < trace.placements; ++p)
    for (int64_t l = 0; l < trace.layers; ++l)
      for (int64_t e = 0; e < trace.experts; ++e) {
        const int64_t rank = trace.owners[(p * trace.layers + l) * trace.experts + e];
        masks_[static_cast<size_t>(p * trace.rank_count + rank) * width +
               static_cast<size_t>(l * trace.words + e / 64)] |= uint64_t{1} << (e % 64);
      }
}

int64_t Pool::add_worker(double now) {
  Worker w;
  w.now = now;
  w.placement = size() % trace_.placements;
  w.distinct.assign(static_cast<size_t>(trace_.layers), 0.0);
  w.totals.distinct.assign(static_cast<size_t>(trace_.layers), 0.0);
  const auto cells = static_cast<size_t>(trace_.layers * trace_.experts);
  if (expected_) w.load.assign(cells, 0);
  if (track_use_) w.totals.use.assign(cells, 0.0);
  workers_.push_back(std::move(w));
  next_.push_back(kNever);
  return size() - 1;
}

double Pool::next_start(const Worker& w) const {
  if (!w.active.empty()) return w.now;
  return w.waiting.empty() ? kNever : std::max(w.now, w.waiting.front().ready);
}

void Pool::schedule(int64_t index) {
  const Worker& w = workers_[static_cast<size_t>(index)];
  next_[static_cast<size_t>(index)] = w.run > 0 ? w.end : next_start(w);
}

void Pool::submit(int64_t index, const Request& request) {
  Worker& w = workers_[static_cast<size_t>(index)];
  w.waiting.push_back(request);
  w.waiting.back().order = submitted_++;
  std::push_heap(w.waiting.begin(), w.waiting.end(), later);
  // A run of equal steps ends at the first boundary at which the newcomer can join.
  if (expected_ && w.run > 1 && request.ready < w.end) {
    w.run = steps_until(w, request.ready, w.run);
    w.end = w.now + span(w, w.run);
  }
  schedule(index);
}

const std::vector<Completion>& Pool::advance(double until) {
  done_.clear();
  for (int64_t i = 0; i < size(); ++i)
    if (next_[static_cast<size_t>(i)] <= until) work(i, until);
  std::sort(done_.begin(), done_.end(), [](const Completion& a, const Completion& b) {
    return a.time != b.time ? a.time < b.time : a.worker != b.worker ? a.worker < b.worker
                                                                      : a.id < b.id;
  });
  clock_ = until;
  return done_;
}

void Pool::work(int64_t index, double until) {
  Worker& w = workers_[static_cast<size_t>(index)];
  for (;;) {
    if (w.run > 0) {
      if (w.end > until) break;
      finish(index, w);
    } else {
      const double start = next_start(w);
      if (!(start < until)) break;  // a step at `until` itself waits for who arrives then
      w.now = start;
      begin(w);
    }
  }
  schedule(index);
}

void Pool::begin(Worker& w) {
  admit(w);
  expected_ ? expect(w) : count(w);
  const auto n = static_cast<double>(w.active.size());
  w.cost = step_.base + step_.expert * w.slowest + step_.kv * static_cast<double>(w.context) +
           step_.request * n;
  w.run = 1;
  if (expected_) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Request& r : w.active) least = std::min(least, r.steps - r.done);
    w.run = least;
    const bool room = static_cast<int64_t>(w.active.size()) < limits_.batch;
    if (room && !w.waiting.empty() && w.waiting.front().ready > w.now)
      w.run = steps_until(w, w.waiting.front().ready, least);
  }
  w.end = w.now + span(w, w.run);
}

void Pool::finish(int64_t index, Worker& w) {
  const int64_t k = w.run;
  const auto n = static_cast<int64_t>(w.active.size());
  Totals& t = w.totals;
  t.seconds += w.end - w.now;
  t.steps += k;
  t.tokens += k * n;
  t.kv += static_cast<double>(k * w.context) + 0.5 * static_cast<double>(n * k * (k - 1));
  t.slowest += static_cast<double>(k) * w.slowest;
  for (size_t l = 0; l < w.distinct.size(); ++l)
    t.distinct[l] += static_cast<double>(k) * w.distinct[l];
  if (track_use_) record_use(w);
  w.now = w.end;
  w.run = 0;
  w.context += k * n;
  size_t kept = 0;
  for (size_t i = 0; i < w.active.size(); ++i) {
    Request& r = w.active[i];
    r.done += k;
    if (r.done < r.steps) {
      if (kept != i) w.active[kept] = r;
      ++kept;
      continue;
    }
    w.reserved -= need(r);
    w.context -= r.context + r.done;
    shift(w, r.row, -1);
    done_.push_back({w.now, index, r.id});
  }
  w.active.resize(kept);
}

void Pool::admit(Worker& w) {
  while (!w.waiting.empty() && w.waiting.front().ready <= w.now &&
         static_cast<int64_t>(w.active.size()) < limits_.batch &&
         w.reserved + need(w.waiting.front()) <= limits_.kv_tokens) {
    std::pop_heap(w.waiting.begin(), w.waiting.end(), later);
    const Request r = w.waiting.back();
    w.waiting.pop_back();
    w.reserved += need(r);
    w.context += r.context + r.done;
    shift(w, r.row, 1);
    w.active.push_back(r);
  }
}

int64_t Pool::token(const Request& r) const {
  const int64_t length = trace_.length[r.row];
  if (r.done < length) return trace_.first[r.row] + r.done;
  const uint64_t draw = mix(mix(seed_ ^ mix(static_cast<uint64_t>(r.id))) +
                            static_cast<uint64_t>(r.done));
  return trace_.first[r.row] + static_cast<int64_t>(draw % static_cast<uint64_t>(length));
}

void Pool::count(Worker& w) {
  const size_t width = read_.size();
  std::fill(read_.begin(), read_.end(), 0);
  for (const Request& r : w.active) {
    const uint64_t* row = trace_.bits + static_cast<size_t>(token(r)) * width;
    for (size_t i = 0; i < width; ++i) read_[i] |= row[i];
  }
  const auto words = static_cast<size_t>(trace_.words);
  int64_t slowest = 0;
  for (size_t l = 0; l < static_cast<size_t>(trace_.layers); ++l) {
    int64_t all = 0, largest = 0;
    for (size_t i = 0; i < words; ++i) all += __builtin_popcountll(read_[l * words + i]);
    for (int64_t rank = 0; trace_.rank_count > 1 && rank < trace_.rank_count; ++rank) {
      const uint64_t* mask = masks_.data() + l * words +
                             static_cast<size_t>(w.placement * trace_.rank_count + rank) * width;
      int64_t held = 0;
      for (size_t i = 0; i < words; ++i)
        held += __builtin_popcountll(read_[l * words + i] & mask[i]);
      largest = std::max(largest, held);
    }
    w.distinct[l] = static_cast<double>(all);
    slowest += trace_.rank_count > 1 ? largest : all;
  }
  w.slowest = static_cast<double>(slowest);
  if (track_use_) w.read = read_;
}

void Pool::record_use(Worker& w) const {
  std::vector<double>& use = w.totals.use;
  const auto k = static_cast<double>(w.run);
  if (expected_) {
    for (size_t c = 0; c < use.size(); ++c)
      use[c] += k * -std::expm1(-kLogUnit * static_cast<double>(w.load[c]));
    return;
  }
  const auto words = static_cast<size_t>(trace_.words);
  for (size_t i = 0; i < w.read.size(); ++i)
    for (uint64_t left = w.read[i]; left != 0; left &= left - 1)
      use[(i / words) * static_cast<size_t>(trace_.experts) + (i % words) * 64 +
          static_cast<size_t>(__builtin_ctzll(left))] += k;
}

void Pool::expect(Worker& w) {
  if (!w.changed) return;
  w.changed = false;
  const auto experts = static_cast<size_t>(trace_.experts);
  w.slowest = 0;
  for (size_t l = 0; l < w.distinct.size(); ++l) {
    double sum = 0;
    for (size_t e = 0; e < experts; ++e) {
      const int64_t load = w.load[l * experts + e];
      if (load != 0) sum += -std::expm1(-kLogUnit * static_cast<double>(load));
    }
    w.distinct[l] = sum;
    w.slowest += trace_.rank_count > 1 ? slowest(w, l) : sum;
  }
}

// Expected maximum over ranks of the distinct experts on a rank, experts independent:
// sum over k of (1 - product over ranks of P(at most k)). eldr/simulation/placement.py has the same.
double Pool::slowest(const Worker& w, size_t layer) {
  const auto experts = static_cast<size_t>(trace_.experts);
  const auto ranks = static_cast<size_t>(trace_.rank_count);
  const auto all = static_cast<size_t>(trace_.layers);
  const uint8_t* owner =
      trace_.owners + (static_cast<size_t>(w.placement) * all + layer) * experts;
  const int64_t* load = w.load.data() + layer * experts;
  size_t held[256] = {}, most = 0;
  for (size_t r = 0; r < ranks; ++r) mass_[r * (experts + 1)] = 1.0;
  for (size_t e = 0; e < experts; ++e) {
    if (load[e] == 0) continue;
    double* mass = mass_.data() + owner[e] * (experts + 1);
    const double idle = std::exp(-kLogUnit * static_cast<double>(load[e]));
    const double read = -std::expm1(-kLogUnit * static_cast<double>(load[e]));
    const size_t n = held[owner[e]]++;
    mass[n + 1] = mass[n] * read;
    for (size_t k = n; k > 0; --k) mass[k] = mass[k] * idle + mass[k - 1] * read;
    mass[0] *= idle;
    most = std::max(most, n + 1);
  }
  for (size_t r = 0; r < ranks; ++r)  // cumulated; beyond what a rank can read the sum is one
    for (size_t k = 1; k <= held[r]; ++k)
      mass_[r * (experts + 1) + k] += mass_[r * (experts + 1) + k - 1];
  double sum = 0;
  for (size_t k = 0; k < most; ++k) {
    double below = 1.0;
    for (size_t r = 0; r < ranks; ++r)
      if (k < held[r]) below *= mass_[r * (experts + 1) + k];
    sum += 1.0 - below;
  }
  return sum;
}

void Pool::shift(Worker& w, int64_t row, int64_t sign) {
  if (!expected_) return;
  const int32_t* logs = trace_.logs + static_cast<size_t>(row) * w.load.size();
  for (size_t c = 0; c < w.load.size(); ++c) w.load[c] += sign * logs[c];
  w.changed = true;
}

double Pool::span(const Worker& w, int64_t steps) const {
  if (steps == 1) return w.cost;
  const auto k = static_cast<double>(steps);
  const auto n = static_cast<double>(w.active.size());
  return k * w.cost + step_.kv * n * (0.5 * k * (k - 1.0));
}

int64_t Pool::steps_until(const Worker& w, double when, int64_t most) const {
  int64_t low = 1, high = most;  // smallest count of steps that ends at or after `when`
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (w.now + span(w, middle) >= when) high = middle;
    else low = middle + 1;
  }
  return low;
}

void Pool::fail(int64_t index, std::vector<int64_t>* running, std::vector<int64_t>* waiting) {
  Worker& w = workers_[static_cast<size_t>(index)];
  for (const Request& r : w.active) running->push_back(r.id);
  std::sort_heap(w.waiting.begin(), w.waiting.end(), later);
  std::reverse(w.waiting.begin(), w.waiting.end());
  for (const Request& r : w.waiting) waiting->push_back(r.id);
  w.active.clear();
  w.waiting.clear();
  std::fill(w.load.begin(), w.load.end(), 0);
  w.reserved = w.context = w.run = 0;
  w.alive = false;
  schedule(index);
}

}  // namespace eldr
