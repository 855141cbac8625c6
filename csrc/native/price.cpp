// Loads and costs of a placement on every candidate, and the best of them; eldr/routing/price.py has
// the formulas and the same operations in the same order. Compiled with -ffp-contract=off, so both
// round alike.
#include <limits>

#include "buffers.h"

namespace {

// Running requests, others' included, per weight.
inline double load_of(const int64_t* requests, const double* others, const double* weight,
                      int64_t slot) {
  return (static_cast<double>(requests[slot]) + others[slot]) / weight[slot];
}

// Whether every candidate is a slot; sets IndexError otherwise.
bool are_slots(const int64_t* candidates, int64_t n, int64_t slots) {
  for (int64_t i = 0; i < n; ++i)
    if (candidates[i] < 0 || candidates[i] >= slots) {
      PyErr_Format(PyExc_IndexError, "candidate %lld: there are %lld slots",
                   static_cast<long long>(candidates[i]), static_cast<long long>(slots));
      return false;
    }
  return true;
}

}  // namespace

namespace eldr {

PyObject* place(PyObject*, PyObject* args) {
  PyObject *dots_o, *idle_o, *requests_o, *others_o, *kv_o, *weight_o, *candidates_o, *terms_o;
  PyObject* out_o;
  int power;
  double guard;
  if (!PyArg_ParseTuple(args, "OOOOOOOOidO", &dots_o, &idle_o, &requests_o, &others_o, &kv_o,
                        &weight_o, &candidates_o, &terms_o, &power, &guard, &out_o))
    return nullptr;
  View<int64_t> dots(dots_o, "dots");
  if (!dots.ok()) return nullptr;
  View<int64_t> idle(idle_o, "idle");
  if (!idle.ok()) return nullptr;
  View<int64_t> requests(requests_o, "requests");
  if (!requests.ok()) return nullptr;
  View<double> others(others_o, "others");
  if (!others.ok()) return nullptr;
  View<int64_t> kv(kv_o, "kv");
  if (!kv.ok()) return nullptr;
  View<double> weight(weight_o, "weight");
  if (!weight.ok()) return nullptr;
  View<int64_t> candidates(candidates_o, "candidates");
  if (!candidates.ok()) return nullptr;
  View<double> terms(terms_o, "terms");
  if (!terms.ok()) return nullptr;
  View<double, true> out(out_o, "out");
  const int64_t slots = dots.size(), n = candidates.size();
  if (!out.ok() || !same_size("idle", idle.size(), slots) ||
      !same_size("requests", requests.size(), slots) ||
      !same_size("others", others.size(), slots) || !same_size("kv", kv.size(), slots) ||
      !same_size("weight", weight.size(), slots) || !same_size("terms", terms.size(), 9) ||
      !same_size("out", out.size(), n) || !are_slots(candidates.data(), n, slots))
    return nullptr;
  const double* t = terms.data();
  const double base = t[0], expert = t[1], per_kv = t[2], request = t[3], cells = t[4];
  const double dot_unit = t[5], idle_unit = t[6], own_kv = t[7], hedge = t[8];
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i)
    sum += load_of(requests.data(), others.data(), weight.data(), candidates.data()[i]);
  const double limit = sum / static_cast<double>(n) * (1.0 + guard) + 1.0;
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t w = candidates.data()[i];
    const double count = static_cast<double>(requests.data()[w]) + others.data()[w];
    const double distinct = cells - static_cast<double>(idle.data()[w]) * idle_unit;
    const double held = static_cast<double>(kv.data()[w]);
    const double step = ((base + expert * distinct) + per_kv * held) + request * count;
    const double added = static_cast<double>(dots.data()[w]) * dot_unit;
    const double more = (expert * added + request) + per_kv * own_kv;
    const double before = step / weight.data()[w];
    const double after = before + more / weight.data()[w];
    double low = before, high = after;
    for (int k = 1; k < power; ++k) {
      low = low * before;
      high = high * after;
    }
    const double rest = count * hedge;
    const double load = load_of(requests.data(), others.data(), weight.data(), w);
    out.data()[i] = load > limit ? std::numeric_limits<double>::infinity()
                                 : (rest + 1.0) * high - rest * low;
    if (out.data()[i] < out.data()[best]) best = i;
  }
  return PyLong_FromLongLong(best);
}

PyObject* least(PyObject*, PyObject* args) {
  PyObject *requests_o, *others_o, *weight_o, *candidates_o, *out_o;
  unsigned long long draw;
  if (!PyArg_ParseTuple(args, "OOOOKO", &requests_o, &others_o, &weight_o, &candidates_o, &draw,
                        &out_o))
    return nullptr;
  View<int64_t> requests(requests_o, "requests");
  if (!requests.ok()) return nullptr;
  View<double> others(others_o, "others");
  if (!others.ok()) return nullptr;
  View<double> weight(weight_o, "weight");
  if (!weight.ok()) return nullptr;
  View<int64_t> candidates(candidates_o, "candidates");
  if (!candidates.ok()) return nullptr;
  View<double, true> out(out_o, "out");
  const int64_t slots = requests.size(), n = candidates.size();
  if (!out.ok() || !same_size("others", others.size(), slots) ||
      !same_size("weight", weight.size(), slots) || !same_size("out", out.size(), n) ||
      !are_slots(candidates.data(), n, slots))
    return nullptr;
  if (n == 0) {
    PyErr_SetString(PyExc_ValueError, "least: no candidates");
    return nullptr;
  }
  double lowest = std::numeric_limits<double>::infinity();
  int64_t ties = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double load =
        load_of(requests.data(), others.data(), weight.data(), candidates.data()[i]);
    out.data()[i] = load;
    if (load < lowest) {
      lowest = load;
      ties = 1;
    } else if (load == lowest) {
      ++ties;
    }
  }
  int64_t skip = ties == 0 ? 0 : static_cast<int64_t>(draw % static_cast<uint64_t>(ties));
  for (int64_t i = 0; i < n; ++i)
    if (out.data()[i] == lowest && skip-- == 0) return PyLong_FromLongLong(i);
  return PyLong_FromLongLong(0);
}

}  // namespace eldr
