// tccl: collectives of the test device. gloo moves the bytes, of views that say that they are of the CPU.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The view holds the tensor, whose memory must live until the collective is done.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

Tensors host_views(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(host_view(tensor));
  return views;
}

std::vector<Tensors> host_views(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& list : lists) views.push_back(host_views(list));
  return views;
}

class Tccl final : public c10d::Backend {
 public:
  Tccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "tccl"; }

  WorkPtr broadcast(Tensors& data, const c10d::BroadcastOptions& options) override {
    auto views = host_views(data);
    return gloo_->broadcast(views, options);
  }
  WorkPtr allreduce(Tensors& data, const c10d::AllreduceOptions& options) override {
    auto views = host_views(data);
    return gloo_->allreduce(views, options);
  }
  WorkPtr allreduce_coalesced(Tensors& data, const c10d::AllreduceCoalescedOptions& options) override {
    auto views = host_views(data);
    return gloo_->allreduce_coalesced(views, options);
  }
  WorkPtr reduce(Tensors& data, const c10d::ReduceOptions& options) override {
    auto views = host_views(data);
    return gloo_->reduce(views, options);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto outs = host_views(out);
    auto ins = host_views(in);
    return gloo_->allgather(outs, ins, options);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = host_view(out);
    auto from = host_view(in);
    return gloo_->_allgather_base(to, from, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto outs = host_views(out);
    auto ins = host_views(in);
    return gloo_->allgather_into_tensor_coalesced(outs, ins, options);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto outs = host_views(out);
    auto ins = host_views(in);
    return gloo_->gather(outs, ins, options);
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto outs = host_views(out);
    auto ins = host_views(in);
    return gloo_->scatter(outs, ins, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = host_view(out);
    auto from = host_view(in);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override {
    auto outs = host_views(out);
    auto ins = host_views(in);
    return gloo_->reduce_scatter_tensor_coalesced(outs, ins, options);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto to = host_view(out);
    auto from = host_view(in);
    return gloo_->alltoall_base(to, from, out_sizes, in_sizes, options);
  }
  WorkPtr send(Tensors& data, int rank, int tag) override {
    auto views = host_views(data);
    return gloo_->send(views, rank, tag);
  }
  WorkPtr recv(Tensors& data, int rank, int tag) override {
    auto views = host_views(data);
    return gloo_->recv(views, rank, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return gloo_->barrier(c10d::BarrierOptions()); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");
  py::class_<Tccl, c10d::Backend, c10::intrusive_ptr<Tccl>>(module, "Tccl")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>>());
}
