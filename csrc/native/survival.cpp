// The decision loops: activation probabilities, integer dot products, survival updates.
//
// All arithmetic is integer, or float32 in a fixed order (this file must be compiled with
// -ffp-contract=off), so that the NumPy fallback makes bit-identical decisions.
#include "buffers.h"
#include "clones.h"

namespace {

constexpr int64_t kBlock = 256;  // cells whose products fit int32: 256 x 2^15 x 255 < 2^31
constexpr float kTop = 32767.0f;

ELDR_CLONES uint32_t activation_loop(const uint32_t* counts, float scale, const float* mean,
                                     float keep, int64_t n, int16_t* out) {
  uint32_t any = 0;
  for (int64_t i = 0; i < n; ++i) {
    any |= counts[i];
    // Counts stay below 2^31 (checked when a signature is decoded): the signed conversion is one
    // instruction, the unsigned one is not.
    const float prior = mean[i] * keep + 0.5f;  // one half, so that truncation rounds
    float v = static_cast<float>(static_cast<int32_t>(counts[i])) * scale + prior;
    v = v < kTop ? v : kTop;
    out[i] = static_cast<int16_t>(static_cast<int32_t>(v));
  }
  return any;
}

ELDR_CLONES int64_t weigh_loop(const uint32_t* counts, const float* weights, float scale,
                               int64_t n, int16_t* out) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    float v = static_cast<float>(static_cast<int32_t>(counts[i])) * weights[i] * scale + 0.5f;
    v = v < kTop ? v : kTop;
    const int32_t x = static_cast<int32_t>(v);
    out[i] = static_cast<int16_t>(x);
    total += static_cast<int64_t>(x) * x;
  }
  return total;
}

// One sum over int16 x int16 products: the form that compilers turn into a multiply-add of pairs.
ELDR_CLONES int64_t dot(const int16_t* x, const uint8_t* row, int64_t n) {
  int64_t total = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = start + kBlock < n ? start + kBlock : n;
    int32_t part = 0;
    for (int64_t i = start; i < stop; ++i) {
      const int16_t cell = row[i];
      part += static_cast<int32_t>(x[i]) * cell;
    }
    total += part;
  }
  return total;
}

ELDR_CLONES bool any_negative(const int16_t* x, int64_t n) {
  int16_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = static_cast<int16_t>(bits | x[i]);
  return bits < 0;
}

ELDR_CLONES int64_t shift_loop(int32_t* load, const int16_t* x, int32_t sign,
                               const uint16_t* cost, const uint8_t* survival, int32_t last,
                               int64_t n, uint8_t* out) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t next = load[i] + sign * cost[x[i]];
    load[i] = next;
    const uint8_t value = survival[next < last ? (next < 0 ? 0 : next) : last];
    out[i] = value;
    total += value;
  }
  return total;
}

}  // namespace

namespace eldr {

PyObject* activate(PyObject*, PyObject* args) {
  PyObject *counts_o, *mean_o, *out_o;
  double scale, keep;
  if (!PyArg_ParseTuple(args, "OdOdO", &counts_o, &scale, &mean_o, &keep, &out_o)) return nullptr;
  View<uint32_t> counts(counts_o, "counts");
  if (!counts.ok()) return nullptr;
  View<float> mean(mean_o, "mean");
  if (!mean.ok()) return nullptr;
  View<int16_t, true> out(out_o, "out");
  if (!out.ok() || !same_size("mean", mean.size(), counts.size()) ||
      !same_size("out", out.size(), counts.size()))
    return nullptr;
  return PyBool_FromLong(activation_loop(counts.data(), static_cast<float>(scale), mean.data(),
                                         static_cast<float>(keep), counts.size(),
                                         out.data()) != 0);
}

PyObject* weigh(PyObject*, PyObject* args) {
  PyObject *counts_o, *weights_o, *out_o;
  double scale;
  if (!PyArg_ParseTuple(args, "OOdO", &counts_o, &weights_o, &scale, &out_o)) return nullptr;
  View<uint32_t> counts(counts_o, "counts");
  if (!counts.ok()) return nullptr;
  View<float> weights(weights_o, "weights");
  if (!weights.ok()) return nullptr;
  View<int16_t, true> out(out_o, "out");
  if (!out.ok() || !same_size("weights", weights.size(), counts.size()) ||
      !same_size("out", out.size(), counts.size()))
    return nullptr;
  return PyLong_FromLongLong(weigh_loop(counts.data(), weights.data(), static_cast<float>(scale),
                                        counts.size(), out.data()));
}

PyObject* dots(PyObject*, PyObject* args) {
  PyObject *x_o, *rows_o, *out_o;
  if (!PyArg_ParseTuple(args, "OOO", &x_o, &rows_o, &out_o)) return nullptr;
  View<int16_t> x(x_o, "x");
  if (!x.ok()) return nullptr;
  View<uint8_t> rows(rows_o, "rows");
  if (!rows.ok()) return nullptr;
  View<int64_t, true> out(out_o, "out");
  if (!out.ok() || !same_size("rows", rows.size(), out.size() * x.size())) return nullptr;
  for (int64_t w = 0; w < out.size(); ++w)
    out.data()[w] = dot(x.data(), rows.data() + w * x.size(), x.size());
  Py_RETURN_NONE;
}

PyObject* shift(PyObject*, PyObject* args) {
  PyObject *load_o, *x_o, *cost_o, *survival_o, *out_o;
  int sign;
  if (!PyArg_ParseTuple(args, "OOiOOO", &load_o, &x_o, &sign, &cost_o, &survival_o, &out_o))
    return nullptr;
  View<int32_t, true> load(load_o, "load");
  if (!load.ok()) return nullptr;
  View<int16_t> x(x_o, "x");
  if (!x.ok()) return nullptr;
  View<uint16_t> cost(cost_o, "cost");
  if (!cost.ok()) return nullptr;
  View<uint8_t> survival(survival_o, "survival");
  if (!survival.ok()) return nullptr;
  View<uint8_t, true> out(out_o, "out");
  if (!out.ok() || !same_size("x", x.size(), load.size()) ||
      !same_size("out", out.size(), load.size()) || !same_size("cost", cost.size(), 32768))
    return nullptr;
  if (survival.size() < 1 || (sign != 1 && sign != -1)) {
    PyErr_SetString(PyExc_ValueError, "shift: sign must be 1 or -1 and survival not empty");
    return nullptr;
  }
  if (any_negative(x.data(), x.size())) {
    PyErr_SetString(PyExc_ValueError, "shift: x must not be negative");
    return nullptr;
  }
  return PyLong_FromLongLong(shift_loop(load.data(), x.data(), sign, cost.data(), survival.data(),
                                        static_cast<int32_t>(survival.size() - 1), load.size(),
                                        out.data()));
}

}  // namespace eldr
