// Loads and costs of a placement on every candidate, and the best of them; eldr/routing/price.py has
// the formulas and the same operations in the same order. Compiled with -ffp-contract=off, so both
// round alike.
#include <algorithm>
#include <limits>

#include "buffers.h"
#include "dots.h"

namespace {

using eldr::same_size;
using eldr::View;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The columns of the worker table that make up load, and the slots that may be chosen.
struct Loads {
  Loads(PyObject* requests, PyObject* others, PyObject* weight, PyObject* candidates)
      : requests(requests, "requests"), others(others, "others"), weight(weight, "weight"),
        candidates(candidates, "candidates") {}

  // Whether all of it can be used, with a candidate at least; sets the error otherwise.
  bool ok() const {
    if (!requests.ok() || !others.ok() || !weight.ok() || !candidates.ok() ||
        !same_size("others", others.size(), slots()) ||
        !same_size("weight", weight.size(), slots()) ||
        !eldr::are_indices("candidate", candidates, slots()))
      return false;
    if (count() == 0) PyErr_SetString(PyExc_ValueError, "no candidates");
    return count() != 0;
  }

  int64_t slots() const { return requests.size(); }
  int64_t count() const { return candidates.size(); }
  int64_t slot(int64_t i) const { return candidates.data()[i]; }

  // Running requests of a slot, others' included, and the same per weight.
  double running(int64_t slot) const {
    return static_cast<double>(requests.data()[slot]) + others.data()[slot];
  }
  double of(int64_t slot) const { return running(slot) / weight.data()[slot]; }

  View<int64_t> requests;
  View<double> others, weight;
  View<int64_t> candidates;
};

// The scalars of the formula, as eldr.routing.price.terms has them, and its two parameters.
struct Terms {
  double base, expert, per_kv, request, cells, dot_unit, idle_unit, own_kv, hedge;
  int power;
  double guard;

  // What one worker's placement costs; see eldr/routing/price.py.
  double increase(int64_t dot, int64_t idle, int64_t kv, double count, double weight) const {
    const double distinct = cells - static_cast<double>(idle) * idle_unit;
    const double held = static_cast<double>(kv);
    const double step = ((base + expert * distinct) + per_kv * held) + request * count;
    const double added = static_cast<double>(dot) * dot_unit;
    const double more = (expert * added + request) + per_kv * own_kv;
    const double before = step / weight;
    const double after = before + more / weight;
    double low = before, high = after;
    for (int k = 1; k < power; ++k) {
      low = low * before;
      high = high * after;
    }
    const double rest = count * hedge;
    return (rest + 1.0) * high - rest * low;
  }
};

}  // namespace

namespace eldr {

PyObject* place(PyObject*, PyObject* args) {
  PyObject *x_o, *survival_o, *idle_o, *requests_o, *others_o, *kv_o, *weight_o, *candidates_o;
  PyObject* out_o;
  Terms t;
  if (!PyArg_ParseTuple(args, "OOOOOOOO(ddddddddd)idO", &x_o, &survival_o, &idle_o, &requests_o,
                        &others_o, &kv_o, &weight_o, &candidates_o, &t.base, &t.expert, &t.per_kv,
                        &t.request, &t.cells, &t.dot_unit, &t.idle_unit, &t.own_kv, &t.hedge,
                        &t.power, &t.guard, &out_o))
    return nullptr;
  const Loads loads(requests_o, others_o, weight_o, candidates_o);
  if (!loads.ok()) return nullptr;
  View<int16_t> x(x_o, "x");
  if (!x.ok()) return nullptr;
  View<uint8_t> survival(survival_o, "survival");
  if (!survival.ok()) return nullptr;
  View<int64_t> idle(idle_o, "idle");
  if (!idle.ok()) return nullptr;
  View<int64_t> kv(kv_o, "kv");
  if (!kv.ok()) return nullptr;
  View<double, true> out(out_o, "out");
  const int64_t n = loads.count(), cells = x.size();
  if (!out.ok() || !same_size("survival", survival.size(), loads.slots() * cells) ||
      !same_size("idle", idle.size(), loads.slots()) ||
      !same_size("kv", kv.size(), loads.slots()) || !same_size("out", out.size(), n))
    return nullptr;
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += loads.of(loads.slot(i));
  const double limit = sum / static_cast<double>(n) * (1.0 + t.guard) + 1.0;
  int64_t best = 0, added = 0;
  eldr::dot_rows(
      x.data(), cells, n, [&](int64_t i) { return survival.data() + loads.slot(i) * cells; },
      [&](int64_t i, int64_t dot) {
        const int64_t w = loads.slot(i);
        const double cost = t.increase(dot, idle.data()[w], kv.data()[w], loads.running(w),
                                       loads.weight.data()[w]);
        out.data()[i] = loads.of(w) > limit ? kInfinity : cost;
        if (i != 0 && !(out.data()[i] < out.data()[best])) return;
        best = i;
        added = dot;
      });
  return Py_BuildValue("LL", static_cast<long long>(best), static_cast<long long>(added));
}

PyObject* least(PyObject*, PyObject* args) {
  PyObject *requests_o, *others_o, *weight_o, *candidates_o, *out_o;
  unsigned long long draw;
  if (!PyArg_ParseTuple(args, "OOOOKO", &requests_o, &others_o, &weight_o, &candidates_o, &draw,
                        &out_o))
    return nullptr;
  const Loads loads(requests_o, others_o, weight_o, candidates_o);
  if (!loads.ok()) return nullptr;
  View<double, true> out(out_o, "out");
  if (!out.ok() || !same_size("out", out.size(), loads.count())) return nullptr;
  double lowest = kInfinity;
  int64_t ties = 0;
  for (int64_t i = 0; i < loads.count(); ++i) {
    const double load = out.data()[i] = loads.of(loads.slot(i));
    if (load < lowest) {
      lowest = load;
      ties = 1;
    } else if (load == lowest) {
      ++ties;
    }
  }
  int64_t skip = ties == 0 ? 0 : static_cast<int64_t>(draw % static_cast<uint64_t>(ties));
  for (int64_t i = 0; i < loads.count(); ++i)
    if (out.data()[i] == lowest && skip-- == 0) return PyLong_FromLongLong(i);
  return PyLong_FromLongLong(0);
}

PyObject* band(PyObject*, PyObject* args) {
  PyObject *similarity_o, *requests_o, *others_o, *weight_o, *candidates_o, *inside_o;
  double tau;
  if (!PyArg_ParseTuple(args, "OdOOOOO", &similarity_o, &tau, &requests_o, &others_o, &weight_o,
                        &candidates_o, &inside_o))
    return nullptr;
  const Loads loads(requests_o, others_o, weight_o, candidates_o);
  if (!loads.ok()) return nullptr;
  View<double> similarity(similarity_o, "similarity");
  if (!similarity.ok()) return nullptr;
  View<int64_t, true> inside(inside_o, "inside");
  const int64_t n = loads.count();
  if (!inside.ok() || !same_size("similarity", similarity.size(), n) ||
      !same_size("inside", inside.size(), n))
    return nullptr;
  const double edge = *std::max_element(similarity.data(), similarity.data() + n) - tau;
  double lowest = kInfinity;
  int64_t found = 0, best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(similarity.data()[i] >= edge)) continue;
    const int64_t slot = loads.slot(i);
    const double load = loads.of(slot);
    if (found == 0 || load < lowest) {
      lowest = load;
      best = slot;
    }
    inside.data()[found++] = slot;
  }
  return Py_BuildValue("LL", static_cast<long long>(best), static_cast<long long>(found));
}

}  // namespace eldr
