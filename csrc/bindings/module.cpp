// The importable module eldr._C: loading it runs the registrations in cpu.cpp and cuda.cpp. It has one constant,
// `cuda_architectures`, empty in a CPU build.
#include <Python.h>

#ifndef ELDR_CUDA_ARCHITECTURES
#define ELDR_CUDA_ARCHITECTURES ""
#endif

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "Kernels of eldr for CPU and CUDA tensors.", -1,
                                 nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C(void) {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  if (PyModule_AddStringConstant(module, "cuda_architectures", ELDR_CUDA_ARCHITECTURES) != 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
