// The CUDA C++ kernels as ops of their own, torch.ops.eldr_cuda: eldr/kernels/backend.py chooses between them and other
// device backends. They return the launcher's code: 0, or ELDR_UNSUPPORTED when nothing was launched.
#ifdef ELDR_WITH_CUDA

#include <torch/csrc/stable/accelerator.h>

#include "arguments.h"

namespace eldr {
namespace {

// The current stream of the tensor's device, which is made current for the launch.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    stream_ = torch::stable::accelerator::getCurrentStream(tensor.get_device_index()).nativeHandle();
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
};

int64_t checked(const char* op, int code) {
  STD_TORCH_CHECK(code <= 0, op, ": launch failed with CUDA error ", code);
  return code;
}

int64_t accumulate_hits(Tensor ids, Tensor slots, int64_t block_size, Tensor histograms) {
  const eldr_accumulate_args a = accumulate_args(ids, slots, block_size, histograms);
  const Launch launch(histograms);
  return checked("accumulate_hits", eldr_cuda_accumulate(&a, launch.stream()));
}

int64_t decide_workspace(int64_t requests, int64_t cells, int64_t workers) {
  return static_cast<int64_t>(eldr_cuda_decide_workspace(as_int("requests", requests), cells, as_int("workers", workers)));
}

int64_t decide(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor vectors, OptionalTensor prior, OptionalTensor squares,
               OptionalTensor tokens, double shrinkage, int64_t rule, std::vector<double> coefficients, OptionalTensor cost,
               OptionalTensor request_kv, Tensor scores, OptionalTensor counts, OptionalTensor load, OptionalTensor state,
               OptionalTensor chosen, Tensor workspace) {
  const eldr_decide_args a = decide_args(histograms, block_ids, offsets, vectors, prior, squares, tokens, shrinkage, rule, coefficients,
                                         cost, request_kv, scores, counts, load, state, chosen);
  const size_t needed = eldr_cuda_decide_workspace(a.gather.requests, a.gather.cells, a.score.workers);
  if (needed == 0) return ELDR_UNSUPPORTED;
  check_tensor("workspace", workspace, ScalarType::Byte, {-1});
  STD_TORCH_CHECK(workspace.size(0) >= static_cast<int64_t>(needed), "workspace: ", workspace.size(0), " bytes, expected ", needed);
  const Launch launch(histograms);
  return checked("decide", eldr_cuda_decide(&a, workspace.mutable_data_ptr(), launch.stream()));
}

}  // namespace

STABLE_TORCH_LIBRARY(eldr_cuda, m) {
  m.def("accumulate_hits(Tensor topk_ids, Tensor slot_mapping, int block_size, Tensor(a!) histograms) -> int");
  m.def("decide_workspace(int requests, int cells, int workers) -> int");
  m.def("decide(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor vectors, Tensor? prior, Tensor? squares, "
        "Tensor? tokens, float shrinkage, int rule, float[] coefficients, Tensor? cost, Tensor? request_kv, "
        "Tensor(a!) scores, Tensor(b!)? counts, Tensor(c!)? load, Tensor(d!)? state, Tensor(e!)? chosen, "
        "Tensor(f!) workspace) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(eldr_cuda, CompositeExplicitAutograd, m) {
  m.impl("decide_workspace", TORCH_BOX(&decide_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(eldr_cuda, CUDA, m) {
  m.impl("accumulate_hits", TORCH_BOX(&accumulate_hits));
  m.impl("decide", TORCH_BOX(&decide));
}

}  // namespace eldr

#endif  // ELDR_WITH_CUDA
