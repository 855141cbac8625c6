// Capacity-constrained assignment of N points to W bins, W << N.
//
// Exact: successive shortest paths (Ahuja, Magnanti, Orlin, Network Flows, ch. 9) on the graph
// whose nodes are the W bins. Every point starts in its cheapest bin; while a bin is overfull, the
// cheapest chain of moves to a bin with room is applied. The cheapest move from bin u to v is kept
// in a heap per pair (u, v), cleaned lazily. Bin prices only shift the start, never the optimum,
// because every bin ends exactly full; good ones (dual ascent, or a former solution's) leave few
// moves to make. The prices come back optimal: with them, every point is in its cheapest bin.
#include "buffers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Move {
  double cost;
  int32_t point;
};

// A binary min-heap by (cost, point); the point breaks ties, so the result is deterministic.
class Heap {
 public:
  bool empty() const { return moves_.empty(); }
  const Move& top() const { return moves_.front(); }
  void append(Move move) { moves_.push_back(move); }
  void build() {
    for (size_t i = moves_.size() / 2; i-- > 0;) sink(i);
  }
  void push(Move move) {
    moves_.push_back(move);
    size_t i = moves_.size() - 1;
    for (; i > 0 && less(move, moves_[(i - 1) / 2]); i = (i - 1) / 2)
      moves_[i] = moves_[(i - 1) / 2];
    moves_[i] = move;
  }
  void pop() {
    moves_.front() = moves_.back();
    moves_.pop_back();
    if (!moves_.empty()) sink(0);
  }

 private:
  static bool less(const Move& a, const Move& b) {
    return a.cost < b.cost || (a.cost == b.cost && a.point < b.point);
  }
  void sink(size_t i) {
    const Move move = moves_[i];
    for (size_t child; (child = 2 * i + 1) < moves_.size(); i = child) {
      if (child + 1 < moves_.size() && less(moves_[child + 1], moves_[child])) ++child;
      if (!less(moves_[child], move)) break;
      moves_[i] = moves_[child];
    }
    moves_[i] = move;
  }
  std::vector<Move> moves_;
};

class Solver {
 public:
  Solver(const float* cost, const int64_t* capacity, double* prices, int64_t points,
         int64_t bins, int32_t* home)
      : cost_(cost), capacity_(capacity), prices_(prices), n_(points), w_(bins), home_(home),
        count_(bins, 0), built_(bins, 0), heaps_(bins * bins), potential_(bins, 0.0),
        distance_(bins), parent_(bins), done_(bins) {}

  // Returns the number of augmentations.
  int64_t solve() {
    for (int64_t i = 0; i < n_; ++i) {
      home_[i] = cheapest(i);
      ++count_[home_[i]];
    }
    int64_t augmentations = 0;
    for (int64_t s = 0; s < w_; ++s)
      for (; count_[s] > capacity_[s]; ++augmentations) augment(s, search(s));
    for (int64_t w = 0; w < w_; ++w) prices_[w] -= potential_[w];
    return augmentations;
  }

 private:
  double priced(int64_t i, int64_t w) const {
    return static_cast<double>(cost_[i * w_ + w]) + prices_[w];
  }

  int32_t cheapest(int64_t i) const {
    int64_t best = 0;
    for (int64_t w = 1; w < w_; ++w)
      if (priced(i, w) < priced(i, best)) best = w;
    return static_cast<int32_t>(best);
  }

  // Heaps of the moves out of `u`, built only for bins that a search expands.
  void build(int64_t u) {
    if (members_.empty()) {
      members_.resize(w_);
      for (int64_t i = 0; i < n_; ++i) members_[home_[i]].push_back(static_cast<int32_t>(i));
    }
    for (const int32_t i : members_[u])
      if (home_[i] == u)
        for (int64_t v = 0; v < w_; ++v)
          if (v != u) heaps_[u * w_ + v].append({priced(i, v) - priced(i, u), i});
    for (int64_t v = 0; v < w_; ++v) heaps_[u * w_ + v].build();
    built_[u] = 1;
  }

  double edge(int64_t u, int64_t v) {
    Heap& heap = heaps_[u * w_ + v];
    while (!heap.empty() && home_[heap.top().point] != u) heap.pop();
    return heap.empty() ? kInfinity : heap.top().cost;
  }

  // Dense Dijkstra over reduced costs from overfull `s` to the nearest bin with room.
  int64_t search(int64_t s) {
    for (int64_t w = 0; w < w_; ++w) {
      distance_[w] = kInfinity;
      parent_[w] = -1;
      done_[w] = 0;
    }
    distance_[s] = 0.0;
    int64_t u = s;
    for (;;) {
      u = -1;
      for (int64_t w = 0; w < w_; ++w)
        if (!done_[w] && distance_[w] < kInfinity && (u < 0 || distance_[w] < distance_[u])) u = w;
      done_[u] = 1;  // capacities sum to N: while a bin is overfull another has room
      if (count_[u] < capacity_[u]) break;
      relax(u);
    }
    for (int64_t w = 0; w < w_; ++w)
      potential_[w] += done_[w] ? distance_[w] : distance_[u];
    return u;
  }

  void relax(int64_t u) {
    if (!built_[u]) build(u);
    for (int64_t v = 0; v < w_; ++v) {
      if (done_[v]) continue;
      const double length = edge(u, v);
      const double next = distance_[u] + length + potential_[u] - potential_[v];
      if (next < distance_[v]) {
        distance_[v] = next;
        parent_[v] = u;
      }
    }
  }

  void augment(int64_t s, int64_t t) {
    for (int64_t v = t; v != s; v = parent_[v]) {
      Heap& heap = heaps_[parent_[v] * w_ + v];
      edge(parent_[v], v);  // drop stale moves
      const int32_t i = heap.top().point;
      heap.pop();
      home_[i] = static_cast<int32_t>(v);
      if (built_[v]) {
        for (int64_t x = 0; x < w_; ++x)
          if (x != v) heaps_[v * w_ + x].push({priced(i, x) - priced(i, v), i});
      } else {
        members_[v].push_back(i);
      }
    }
    --count_[s];
    ++count_[t];
  }

  const float* cost_;
  const int64_t* capacity_;
  double* prices_;
  int64_t n_, w_;
  int32_t* home_;
  std::vector<int64_t> count_;
  std::vector<char> built_;
  std::vector<Heap> heaps_;
  std::vector<double> potential_, distance_;
  std::vector<int64_t> parent_;
  std::vector<char> done_;
  std::vector<std::vector<int32_t>> members_;
};

// Points whose cheapest priced bin is w, per bin.
void demand(const float* cost, const double* prices, int64_t n, int64_t bins,
            std::vector<float>& price, std::vector<int64_t>& count) {
  for (int64_t w = 0; w < bins; ++w) price[w] = static_cast<float>(prices[w]);
  std::fill(count.begin(), count.end(), 0);
  for (int64_t i = 0; i < n; ++i) {
    const float* row = cost + i * bins;
    float best = row[0] + price[0];
    int64_t at = 0;
    for (int64_t w = 1; w < bins; ++w) {
      const float value = row[w] + price[w];
      if (value < best) {
        best = value;
        at = w;
      }
    }
    ++count[at];
  }
}

// Raises the price of crowded bins and lowers that of empty ones; keeps the best prices seen.
int64_t ascend(const float* cost, const int64_t* capacity, double* prices, int64_t n, int64_t bins,
               int64_t rounds, double step) {
  std::vector<double> best(prices, prices + bins);
  std::vector<float> price(bins);
  std::vector<int64_t> count(bins);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t round = 0; round < rounds; ++round) {
    demand(cost, prices, n, bins, price, count);
    int64_t over = 0;
    for (int64_t w = 0; w < bins; ++w)
      if (count[w] > capacity[w]) over += count[w] - capacity[w];
    if (over < least) {
      least = over;
      best.assign(prices, prices + bins);
    }
    if (over == 0) break;
    for (int64_t w = 0; w < bins; ++w) {
      const double room = static_cast<double>(capacity[w] > 0 ? capacity[w] : 1);
      prices[w] += step * static_cast<double>(count[w] - capacity[w]) / room;
    }
    step *= 0.99;
  }
  std::copy(best.begin(), best.end(), prices);
  return least;
}

bool finite(const char* name, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!std::isfinite(values[i])) {
      PyErr_Format(PyExc_ValueError, "%s: element %lld is not finite", name,
                   static_cast<long long>(i));
      return false;
    }
  return true;
}

bool capacities(const int64_t* capacity, int64_t bins, int64_t points) {
  int64_t sum = 0;
  for (int64_t w = 0; w < bins; ++w) {
    if (capacity[w] < 0) {
      PyErr_Format(PyExc_ValueError, "capacity[%lld] is negative", static_cast<long long>(w));
      return false;
    }
    sum += capacity[w];
  }
  if (sum == points) return true;
  PyErr_Format(PyExc_ValueError, "capacities sum to %lld, but there are %lld points",
               static_cast<long long>(sum), static_cast<long long>(points));
  return false;
}

}  // namespace

namespace eldr {

PyObject* assign_exact(PyObject*, PyObject* args) {
  PyObject *cost_o, *capacity_o, *prices_o, *out_o;
  if (!PyArg_ParseTuple(args, "OOOO", &cost_o, &capacity_o, &prices_o, &out_o)) return nullptr;
  View<float> cost(cost_o, "cost");
  if (!cost.ok()) return nullptr;
  View<int64_t> capacity(capacity_o, "capacity");
  if (!capacity.ok()) return nullptr;
  View<double, true> prices(prices_o, "prices");
  if (!prices.ok()) return nullptr;
  View<int32_t, true> out(out_o, "out");
  const int64_t n = out.size(), bins = capacity.size();
  if (!out.ok() || !same_size("cost", cost.size(), n * bins) ||
      !same_size("prices", prices.size(), bins) || !finite("cost", cost.data(), n * bins) ||
      !capacities(capacity.data(), bins, n))
    return nullptr;
  int64_t augmentations = 0;
  bool memory = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    augmentations =
        Solver(cost.data(), capacity.data(), prices.data(), n, bins, out.data()).solve();
  } catch (const std::bad_alloc&) {
    memory = false;
  }
  Py_END_ALLOW_THREADS;
  return memory ? PyLong_FromLongLong(augmentations) : PyErr_NoMemory();
}

PyObject* assign_prices(PyObject*, PyObject* args) {
  PyObject *cost_o, *capacity_o, *prices_o;
  long long rounds;
  double step;
  if (!PyArg_ParseTuple(args, "OOOLd", &cost_o, &capacity_o, &prices_o, &rounds, &step))
    return nullptr;
  View<float> cost(cost_o, "cost");
  if (!cost.ok()) return nullptr;
  View<int64_t> capacity(capacity_o, "capacity");
  if (!capacity.ok()) return nullptr;
  View<double, true> prices(prices_o, "prices");
  const int64_t bins = capacity.size();
  if (!prices.ok() || !same_size("prices", prices.size(), bins)) return nullptr;
  const int64_t n = bins > 0 ? cost.size() / bins : 0;
  if (!same_size("cost", cost.size(), n * bins) || !finite("cost", cost.data(), cost.size()) ||
      !capacities(capacity.data(), bins, n))
    return nullptr;
  int64_t over = 0;
  Py_BEGIN_ALLOW_THREADS;
  over = ascend(cost.data(), capacity.data(), prices.data(), n, bins, rounds, step);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(over);
}

}  // namespace eldr
