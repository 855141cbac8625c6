// The decision loops: activation probabilities, integer dot products, survival updates.
//
// All arithmetic is integer, or float32 in a fixed order (this file must be compiled with
// -ffp-contract=off), so that the NumPy fallback makes bit-identical decisions.
#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "buffers.h"
#include "clones.h"
#include "dots.h"

namespace {

using eldr::dot_rows;

constexpr float kTop = 32767.0f;

ELDR_CLONES uint32_t activation_loop(const uint32_t* __restrict counts, float scale,
                                     const float* __restrict mean, float keep, int64_t n,
                                     int16_t* __restrict out) {
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

ELDR_CLONES void add_loop(const uint32_t* __restrict counts, int64_t n, uint32_t* __restrict sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += counts[i];
}

ELDR_CLONES int64_t weigh_loop(const uint32_t* counts, const float* weights, float scale,
                               int64_t n, int16_t* out) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    float v = static_cast<float>(static_cast<int32_t>(counts[i])) * weights[i] * scale + 0.5f;
    v = v < kTop ? v : kTop;
    const int32_t x = static_cast<int32_t>(v);
    out[i] = static_cast<int16_t>(x);
    total += x * x;  // below 2^30: only the sum needs wide registers
  }
  return total;
}

ELDR_CLONES bool any_negative(const int16_t* x, int64_t n) {
  int16_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = static_cast<int16_t>(bits | x[i]);
  return bits < 0;
}

// out[i] = table[at[i]]; unrolled, since a look-up costs less than counting it.
template <typename T>
inline void look_up(const T* __restrict table, const uint16_t* __restrict at, int64_t n,
                    T* __restrict out) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < n; ++i) out[i] = table[at[i]];
}

// load += sign * step; out = table[load]; returns the sum of `out`. Look-ups and arithmetic in turns:
// only without the look-ups does a compiler use wide registers.
ELDR_CLONES int64_t shift_loop(int32_t* __restrict load, const uint16_t* __restrict step,
                               int32_t sign, const uint8_t* __restrict table, int32_t last,
                               int64_t n, uint8_t* __restrict out) {
  constexpr int64_t kChunk = 512;
  uint16_t at[kChunk];
  int64_t total = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t count = std::min(kChunk, n - start);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t next = load[start + i] + sign * step[start + i];
      load[start + i] = next;
      at[i] = static_cast<uint16_t>(std::min(std::max(next, 0), last));
    }
    look_up(table, at, count, out + start);
    int32_t part = 0;
    for (int64_t i = 0; i < count; ++i) part += out[start + i];
    total += part;
  }
  return total;
}

constexpr int64_t kBlock = 256;  // cells whose products fit int32: 256 x 2^15 x 255 < 2^31

}  // namespace

namespace eldr {

// int16 x int16 products: the form that compilers turn into a multiply-add of pairs.
ELDR_CLONES void dot_tile(const int16_t* x, const uint8_t* const* rows, int64_t n, int64_t* out) {
  const uint8_t *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
  int64_t total[kTile] = {0, 0, 0, 0};
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, n);
    int32_t p = 0, q = 0, r = 0, s = 0;
    for (int64_t i = start; i < stop; ++i) {
      const int32_t value = x[i];
      p += value * static_cast<int16_t>(a[i]);
      q += value * static_cast<int16_t>(b[i]);
      r += value * static_cast<int16_t>(c[i]);
      s += value * static_cast<int16_t>(d[i]);
    }
    total[0] += p;
    total[1] += q;
    total[2] += r;
    total[3] += s;
  }
  for (int64_t k = 0; k < kTile; ++k) out[k] = total[k];
}

PyObject* admit(PyObject*, PyObject* args) {
  PyObject *counts_o, *mean_o, *cost_o, *x_o, *step_o, *sum_o;
  double scale, keep;
  if (!PyArg_ParseTuple(args, "OdOdOOOO", &counts_o, &scale, &mean_o, &keep, &cost_o, &x_o,
                        &step_o, &sum_o))
    return nullptr;
  View<uint32_t> counts(counts_o, "counts");
  if (!counts.ok()) return nullptr;
  View<float> mean(mean_o, "mean");
  if (!mean.ok()) return nullptr;
  View<uint16_t> cost(cost_o, "cost");
  if (!cost.ok()) return nullptr;
  View<int16_t, true> x(x_o, "x");
  if (!x.ok()) return nullptr;
  View<uint16_t, true> step(step_o, "step");
  if (!step.ok()) return nullptr;
  View<uint32_t, true> sum(sum_o, "sum");
  const int64_t n = counts.size();
  if (!sum.ok() || !same_size("mean", mean.size(), n) || !same_size("x", x.size(), n) ||
      !same_size("step", step.size(), n) || !same_size("sum", sum.size(), n) ||
      !same_size("cost", cost.size(), 32768))
    return nullptr;
  const uint32_t any = activation_loop(counts.data(), static_cast<float>(scale), mean.data(),
                                       static_cast<float>(keep), n, x.data());
  if (any_negative(x.data(), n)) {
    PyErr_SetString(PyExc_ValueError, "admit: x must not be negative");
    return nullptr;
  }
  add_loop(counts.data(), n, sum.data());
  look_up(cost.data(), reinterpret_cast<const uint16_t*>(x.data()), n, step.data());
  return PyBool_FromLong(any != 0);
}

PyObject* similarities(PyObject*, PyObject* args) {
  PyObject *counts_o, *weights_o, *rows_o, *unit_o, *of_o, *out_o;
  double scale;
  if (!PyArg_ParseTuple(args, "OOdOOOO", &counts_o, &weights_o, &scale, &rows_o, &unit_o, &of_o,
                        &out_o))
    return nullptr;
  View<uint32_t> counts(counts_o, "counts");
  if (!counts.ok()) return nullptr;
  View<float> weights(weights_o, "weights");
  if (!weights.ok()) return nullptr;
  View<uint8_t> rows(rows_o, "rows");
  if (!rows.ok()) return nullptr;
  View<double> unit(unit_o, "unit");
  if (!unit.ok()) return nullptr;
  View<int64_t> of(of_o, "of");
  if (!of.ok()) return nullptr;
  View<double, true> out(out_o, "out");
  const int64_t n = counts.size();
  if (!out.ok() || !same_size("weights", weights.size(), n) ||
      !same_size("rows", rows.size(), unit.size() * n) ||
      !same_size("out", out.size(), of.size()) || !are_indices("of", of, unit.size()))
    return nullptr;
  const std::unique_ptr<int16_t[]> x(new (std::nothrow) int16_t[static_cast<size_t>(n)]);
  if (x == nullptr) return PyErr_NoMemory();
  const int64_t squares =
      weigh_loop(counts.data(), weights.data(), static_cast<float>(scale), n, x.get());
  if (squares == 0) Py_RETURN_FALSE;
  const double shrink = 1.0 / std::sqrt(static_cast<double>(squares));
  dot_rows(
      x.get(), n, of.size(), [&](int64_t i) { return rows.data() + of.data()[i] * n; },
      [&](int64_t i, int64_t dot) {
        out.data()[i] = static_cast<double>(dot) * unit.data()[of.data()[i]] * shrink;
      });
  Py_RETURN_TRUE;
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
  dot_rows(
      x.data(), x.size(), out.size(), [&](int64_t w) { return rows.data() + w * x.size(); },
      [&](int64_t w, int64_t dot) { out.data()[w] = dot; });
  Py_RETURN_NONE;
}

PyObject* shift(PyObject*, PyObject* args) {
  PyObject *load_o, *survival_o, *idle_o, *step_o, *table_o;
  long long slot;
  int sign;
  if (!PyArg_ParseTuple(args, "OOOLOiO", &load_o, &survival_o, &idle_o, &slot, &step_o, &sign,
                        &table_o))
    return nullptr;
  View<int32_t, true> load(load_o, "load");
  if (!load.ok()) return nullptr;
  View<uint8_t, true> survival(survival_o, "survival");
  if (!survival.ok()) return nullptr;
  View<int64_t, true> idle(idle_o, "idle");
  if (!idle.ok()) return nullptr;
  View<uint16_t> step(step_o, "step");
  if (!step.ok()) return nullptr;
  View<uint8_t> table(table_o, "table");
  const int64_t n = step.size();
  if (!table.ok() || !same_size("load", load.size(), idle.size() * n) ||
      !same_size("survival", survival.size(), idle.size() * n))
    return nullptr;
  if (slot < 0 || slot >= idle.size()) {
    PyErr_Format(PyExc_IndexError, "shift: slot %lld of %lld", slot,
                 static_cast<long long>(idle.size()));
    return nullptr;
  }
  if (table.size() < 1 || table.size() > 65536 || (sign != 1 && sign != -1)) {
    PyErr_SetString(PyExc_ValueError,
                    "shift: sign must be 1 or -1 and the table of 1 to 65536 elements");
    return nullptr;
  }
  idle.data()[slot] =
      shift_loop(load.data() + slot * n, step.data(), sign, table.data(),
                 static_cast<int32_t>(table.size() - 1), n, survival.data() + slot * n);
  Py_RETURN_NONE;
}

}  // namespace eldr
