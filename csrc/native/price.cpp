// The cost of a placement on every worker; eldr/routing/price.py has the formula and the same
// operations in the same order. Compiled with -ffp-contract=off, so both round alike.
#include "buffers.h"

namespace eldr {

PyObject* increase(PyObject*, PyObject* args) {
  PyObject *dots_o, *idle_o, *requests_o, *others_o, *kv_o, *weight_o, *terms_o, *out_o;
  int power;
  if (!PyArg_ParseTuple(args, "OOOOOOOiO", &dots_o, &idle_o, &requests_o, &others_o, &kv_o,
                        &weight_o, &terms_o, &power, &out_o))
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
  View<double> terms(terms_o, "terms");
  if (!terms.ok()) return nullptr;
  View<double, true> out(out_o, "out");
  const int64_t n = out.size();
  if (!out.ok() || !same_size("dots", dots.size(), n) || !same_size("idle", idle.size(), n) ||
      !same_size("requests", requests.size(), n) || !same_size("others", others.size(), n) ||
      !same_size("kv", kv.size(), n) || !same_size("weight", weight.size(), n) ||
      !same_size("terms", terms.size(), 9))
    return nullptr;
  const double* t = terms.data();
  const double base = t[0], expert = t[1], per_kv = t[2], request = t[3], cells = t[4];
  const double dot_unit = t[5], idle_unit = t[6], own_kv = t[7], hedge = t[8];
  for (int64_t w = 0; w < n; ++w) {
    const double count = static_cast<double>(requests.data()[w]) + others.data()[w];
    const double distinct = cells - static_cast<double>(idle.data()[w]) * idle_unit;
    const double held = static_cast<double>(kv.data()[w]);
    const double step = ((base + expert * distinct) + per_kv * held) + request * count;
    const double added = static_cast<double>(dots.data()[w]) * dot_unit;
    const double more = (expert * added + request) + per_kv * own_kv;
    const double before = step / weight.data()[w];
    const double after = before + more / weight.data()[w];
    double low = before, high = after;
    for (int i = 1; i < power; ++i) {
      low = low * before;
      high = high * after;
    }
    const double rest = count * hedge;
    out.data()[w] = (rest + 1.0) * high - rest * low;
  }
  Py_RETURN_NONE;
}

}  // namespace eldr
