// Python's door to the simulator's decode pool: a capsule that owns it and the buffers it reads.
#include <new>

#include "buffers.h"
#include "simulate.h"

namespace eldr {
template <> struct Codes<uint64_t> { static constexpr const char* value = "LQ"; };
}  // namespace eldr

namespace {

using eldr::View;

constexpr const char* kName = "eldr.simulation.pool";

struct Owned {  // the views keep the arrays alive, and their memory fixed, for the pool's life
  Owned(PyObject* bits, PyObject* first, PyObject* length, PyObject* logs, PyObject* owners)
      : bits(bits, "bits"), first(first, "first"), length(length, "length"), logs(logs, "logs"),
        owners(owners, "owners") {}
  bool ok() const {
    return bits.ok() && first.ok() && length.ok() && logs.ok() && owners.ok();
  }
  View<uint64_t> bits;
  View<int64_t> first, length;
  View<int32_t> logs;
  View<uint8_t> owners;
  eldr::Pool* pool = nullptr;
  ~Owned() { delete pool; }
};

Owned* owned(PyObject* capsule) {
  return static_cast<Owned*>(PyCapsule_GetPointer(capsule, kName));
}

void destroy(PyObject* capsule) { delete owned(capsule); }

bool check(const Owned& o, const eldr::Trace& t, bool expected) {
  if (t.layers < 1 || t.experts < 1 || t.rank_count < 1 || t.rank_count > 255 ||
      t.placements < 1) {
    PyErr_SetString(PyExc_ValueError, "simulate_new: layers, experts, ranks out of range");
    return false;
  }
  const int64_t requests = o.first.size(), width = t.layers * t.words;
  if (!eldr::same_size("length", o.length.size(), requests) ||
      !eldr::same_size("owners", o.owners.size(), t.placements * t.layers * t.experts) ||
      !eldr::same_size("logs", o.logs.size(), expected ? requests * t.layers * t.experts : 0))
    return false;
  for (int64_t i = 0; i < o.owners.size(); ++i)
    if (t.owners[i] >= t.rank_count) {
      PyErr_Format(PyExc_ValueError, "simulate_new: rank %d of %lld", int{t.owners[i]},
                   static_cast<long long>(t.rank_count));
      return false;
    }
  const int64_t rows = o.bits.size() / width;
  for (int64_t i = 0; !expected && i < requests; ++i)
    if (t.length[i] < 1 || t.first[i] < 0 || t.first[i] + t.length[i] > rows) {
      PyErr_Format(PyExc_ValueError, "simulate_new: request %lld lies outside the trace",
                   static_cast<long long>(i));
      return false;
    }
  return true;
}

eldr::Worker const* worker_of(Owned* o, long long w) {
  if (o == nullptr) return nullptr;
  if (w < 0 || w >= o->pool->size()) {
    PyErr_Format(PyExc_ValueError, "worker: expected [0, %lld), got %lld",
                 static_cast<long long>(o->pool->size()), w);
    return nullptr;
  }
  return &o->pool->worker(w);
}

PyObject* id_list(const std::vector<int64_t>& ids) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(ids.size()));
  for (size_t i = 0; list != nullptr && i < ids.size(); ++i)
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(ids[i]));
  return list;
}

}  // namespace

namespace eldr {

PyObject* simulate_new(PyObject*, PyObject* args) {
  PyObject *bits, *first, *length, *logs, *owners;
  Trace t{};
  Step s{};
  Limits limits{};
  unsigned long long seed;
  int expected, use;
  long long layers, experts, rank_count, batch, kv;
  if (!PyArg_ParseTuple(args, "OOOOOLLLddddLLKpp", &bits, &first, &length, &logs, &owners, &layers,
                        &experts, &rank_count, &s.base, &s.expert, &s.kv, &s.request, &batch, &kv,
                        &seed, &expected, &use))
    return nullptr;
  auto* o = new (std::nothrow) Owned(bits, first, length, logs, owners);
  if (o == nullptr) return PyErr_NoMemory();
  t.layers = layers, t.experts = experts, t.words = (experts + 63) / 64, t.rank_count = rank_count;
  t.bits = o->bits.data(), t.first = o->first.data(), t.length = o->length.data();
  t.logs = o->logs.data(), t.owners = o->owners.data();
  t.placements = layers > 0 && experts > 0 ? o->owners.size() / (layers * experts) : 0;
  limits.batch = batch, limits.kv_tokens = kv;
  if (!o->ok() || !check(*o, t, expected != 0)) {
    delete o;
    return nullptr;
  }
  o->pool = new Pool(t, s, limits, seed, expected != 0, use != 0);
  return PyCapsule_New(o, kName, destroy);
}

PyObject* simulate_add(PyObject*, PyObject* args) {
  PyObject* capsule;
  double now;
  if (!PyArg_ParseTuple(args, "Od", &capsule, &now)) return nullptr;
  Owned* o = owned(capsule);
  return o == nullptr ? nullptr : PyLong_FromLongLong(o->pool->add_worker(now));
}

PyObject* simulate_submit(PyObject*, PyObject* args) {
  PyObject* capsule;
  long long w, id, row, steps, context;
  double ready;
  if (!PyArg_ParseTuple(args, "OLLLLLd", &capsule, &w, &id, &row, &steps, &context, &ready))
    return nullptr;
  Owned* o = owned(capsule);
  const Worker* worker = worker_of(o, w);
  if (worker == nullptr) return nullptr;
  if (row < 0 || row >= o->first.size() || steps < 1 || context < 0) {
    PyErr_Format(PyExc_ValueError, "submit: row %lld, steps %lld or context %lld out of range", row,
                 steps, context);
    return nullptr;
  }
  if (!worker->alive || !(ready >= o->pool->clock())) {
    PyErr_SetString(PyExc_ValueError, "submit: the worker has failed, or `ready` is in the past");
    return nullptr;
  }
  if (context + steps > o->pool->limits().kv_tokens) {
    PyErr_Format(PyExc_ValueError, "submit: %lld tokens never fit the worker's %lld KV tokens",
                 context + steps, static_cast<long long>(o->pool->limits().kv_tokens));
    return nullptr;
  }
  o->pool->submit(w, Request{id, row, steps, context, 0, ready, 0});
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject* simulate_advance(PyObject*, PyObject* args) {
  PyObject* capsule;
  double until;
  if (!PyArg_ParseTuple(args, "Od", &capsule, &until)) return nullptr;
  Owned* o = owned(capsule);
  if (o == nullptr) return nullptr;
  if (!(until >= o->pool->clock())) {
    PyErr_SetString(PyExc_ValueError, "advance: time must not run back");
    return nullptr;
  }
  const auto& done = o->pool->advance(until);
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(done.size()));
  for (size_t i = 0; list != nullptr && i < done.size(); ++i)
    PyList_SetItem(list, static_cast<Py_ssize_t>(i),
                   Py_BuildValue("dLL", done[i].time, static_cast<long long>(done[i].worker),
                                 static_cast<long long>(done[i].id)));
  return list;
}

PyObject* simulate_fail(PyObject*, PyObject* args) {
  PyObject* capsule;
  long long w;
  if (!PyArg_ParseTuple(args, "OL", &capsule, &w)) return nullptr;
  Owned* o = owned(capsule);
  if (worker_of(o, w) == nullptr) return nullptr;
  std::vector<int64_t> running, waiting;
  o->pool->fail(w, &running, &waiting);
  return Py_BuildValue("NN", id_list(running), id_list(waiting));
}

PyObject* simulate_totals(PyObject*, PyObject* args) {
  PyObject *capsule, *scalar_object, *distinct_object, *use_object;
  long long w;
  if (!PyArg_ParseTuple(args, "OLOOO", &capsule, &w, &scalar_object, &distinct_object,
                        &use_object))
    return nullptr;
  const Worker* worker = worker_of(owned(capsule), w);
  if (worker == nullptr) return nullptr;
  View<double, true> scalar(scalar_object, "scalar"), distinct(distinct_object, "distinct"),
      use(use_object, "use");
  if (!scalar.ok() || !distinct.ok() || !use.ok()) return nullptr;
  const Totals& t = worker->totals;
  if (!same_size("scalar", scalar.size(), 8) ||
      !same_size("distinct", distinct.size(), static_cast<int64_t>(t.distinct.size())) ||
      !same_size("use", use.size(), static_cast<int64_t>(t.use.size())))
    return nullptr;
  const double values[8] = {t.seconds, static_cast<double>(t.steps), static_cast<double>(t.tokens),
                            t.kv, t.slowest, static_cast<double>(worker->active.size()),
                            static_cast<double>(worker->waiting.size()),
                            static_cast<double>(worker->reserved)};
  std::memcpy(scalar.data(), values, sizeof values);
  std::memcpy(distinct.data(), t.distinct.data(), t.distinct.size() * sizeof(double));
  if (!t.use.empty()) std::memcpy(use.data(), t.use.data(), t.use.size() * sizeof(double));
  Py_INCREF(Py_None);
  return Py_None;
}

}  // namespace eldr
