// Typed, contiguous views of Python buffers for eldr._native (limited API, no NumPy headers).
#pragma once

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <cstdint>
#include <cstring>

namespace eldr {

// The struct-module codes that name a type; `long` is 64 bits on every platform we build for.
template <typename T> struct Codes;
template <> struct Codes<float> { static constexpr const char* value = "f"; };
template <> struct Codes<double> { static constexpr const char* value = "d"; };
template <> struct Codes<uint8_t> { static constexpr const char* value = "B"; };
template <> struct Codes<int16_t> { static constexpr const char* value = "h"; };
template <> struct Codes<uint16_t> { static constexpr const char* value = "H"; };
template <> struct Codes<int32_t> { static constexpr const char* value = "i"; };
template <> struct Codes<uint32_t> { static constexpr const char* value = "I"; };
template <> struct Codes<int64_t> { static constexpr const char* value = "lq"; };

// Holds one buffer for the length of a call. `ok()` is false after an error was set.
template <typename T, bool Writable = false> class View {
 public:
  View(PyObject* object, const char* name) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (Writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &view_, flags) != 0) return;
    held_ = true;
    const char* format = view_.format != nullptr ? view_.format : "B";
    if (*format == '<' || *format == '=' || *format == '@') ++format;
    if (view_.itemsize != static_cast<Py_ssize_t>(sizeof(T)) || format[0] == '\0' ||
        format[1] != '\0' || std::strchr(Codes<T>::value, format[0]) == nullptr) {
      PyErr_Format(PyExc_TypeError, "%s: expected elements '%s' of %zd bytes, got '%s' of %zd",
                   name, Codes<T>::value, static_cast<Py_ssize_t>(sizeof(T)), format,
                   view_.itemsize);
      return;
    }
    ok_ = true;
  }
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  bool ok() const { return ok_; }
  T* data() const { return static_cast<T*>(view_.buf); }
  int64_t size() const { return view_.len / static_cast<Py_ssize_t>(sizeof(T)); }

 private:
  Py_buffer view_{};
  bool held_ = false;
  bool ok_ = false;
};

// Sets ValueError and returns false unless `actual` equals `expected`.
inline bool same_size(const char* name, int64_t actual, int64_t expected) {
  if (actual == expected) return true;
  PyErr_Format(PyExc_ValueError, "%s: expected %lld elements, got %lld", name,
               static_cast<long long>(expected), static_cast<long long>(actual));
  return false;
}

// Sets IndexError and returns false unless all of `values` index an array of `size`.
inline bool are_indices(const char* name, const View<int64_t>& values, int64_t size) {
  for (int64_t i = 0; i < values.size(); ++i)
    if (values.data()[i] < 0 || values.data()[i] >= size) {
      PyErr_Format(PyExc_IndexError, "%s %lld: expected [0, %lld)", name,
                   static_cast<long long>(values.data()[i]), static_cast<long long>(size));
      return false;
    }
  return true;
}

PyObject* assign_exact(PyObject*, PyObject* args);
PyObject* assign_prices(PyObject*, PyObject* args);
PyObject* admit(PyObject*, PyObject* args);
PyObject* band(PyObject*, PyObject* args);
PyObject* dots(PyObject*, PyObject* args);
PyObject* least(PyObject*, PyObject* args);
PyObject* place(PyObject*, PyObject* args);
PyObject* shift(PyObject*, PyObject* args);
PyObject* similarities(PyObject*, PyObject* args);
PyObject* unbase64(PyObject*, PyObject* text);
PyObject* unpack(PyObject*, PyObject* args);
PyObject* simulate_new(PyObject*, PyObject* args);
PyObject* simulate_add(PyObject*, PyObject* args);
PyObject* simulate_submit(PyObject*, PyObject* args);
PyObject* simulate_advance(PyObject*, PyObject* args);
PyObject* simulate_fail(PyObject*, PyObject* args);
PyObject* simulate_totals(PyObject*, PyObject* args);

}  // namespace eldr
