// A device for tests: torch's PrivateUse1 with memory of the host that no CPU operator accepts.
//
// Tensors on it are no CPU tensors: an operator that mixes both fails, as on a real device. Operators that need no
// arithmetic are written here; all others run on the CPU by torch's fallback, so that results equal the CPU's.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMostDevices = 8;
constexpr auto kStat = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
thread_local c10::DeviceIndex current = 0;

// TXDA_VISIBLE_DEVICES hides devices, as a vendor's driver would.
c10::DeviceIndex count_devices() {
  const char* visible = std::getenv("TXDA_VISIBLE_DEVICES");
  if (visible == nullptr) return kMostDevices;
  std::string list(visible);
  return list.empty() ? 0 : std::min<long>(kMostDevices, 1 + std::count(list.begin(), list.end(), ','));
}
const c10::DeviceIndex kDevices = count_devices();

// Streams and events exist and do nothing: every operator is done when it returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Block {
  void* data;
  size_t bytes;
};

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0 && posix_memalign(&data, 64, bytes) != 0) throw std::bad_alloc();
    std::lock_guard<std::mutex> held(mutex_);
    used_.increase(bytes);
    return {data, new Block{data, bytes}, &Memory::release, c10::Device(kDevice, current)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> held(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[kStat] = used_;
    stats.reserved_bytes[kStat] = used_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> held(mutex_);
    used_.reset_peak();
  }

 private:
  static void release(void* context);
  std::mutex mutex_;
  c10::CachingAllocator::Stat used_;
};

Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory);

void Memory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::free(block->data);
  std::lock_guard<std::mutex> held(memory.mutex_);
  memory.used_.decrease(block->bytes);
  delete block;
}

// Host memory that says that it is pinned.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes > 0 ? bytes : 1);
    std::lock_guard<std::mutex> held(mutex_);
    pointers_.insert(data);
    return {data, data, &Pinned::release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool has(const void* data) {
    std::lock_guard<std::mutex> held(mutex_);
    return pointers_.count(data) > 0;
  }

 private:
  static void release(void* data);
  std::mutex mutex_;
  std::set<const void*> pointers_;
};

Pinned pinned;

void Pinned::release(void* data) {
  std::lock_guard<std::mutex> held(pinned.mutex_);
  pinned.pointers_.erase(data);
  std::free(data);
}

void grow(c10::StorageImpl* storage, size_t bytes) {
  auto fresh = memory.allocate(bytes);
  if (auto kept = std::min(bytes, storage->nbytes())) std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  auto host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset.has_value()) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;  // a view keeps its strides
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = (impl->numel() + impl->storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) grow(storage, needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

void record_stream(at::Tensor&, at::Stream) {}

at::Scalar read_scalar(const at::Tensor& self) { return on_host(self).item(); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("record_stream", &record_stream);
  library.impl("_local_scalar_dense", &read_scalar);
}

// The CPU's operator draws numbers from a CPU generator in the state of the device's, which goes on from there.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  std::optional<at::Generator> own, host;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].type()->str() != "Generator?") continue;
    auto& given = (*stack)[first + i];
    own = given.isNone() ? at::globalContext().defaultGenerator(c10::Device(kDevice, current)) : given.toGenerator();
    host = at::make_generator<at::CPUGeneratorImpl>();
    host->set_state(own->get_state());
    given = *host;
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  if (own.has_value()) own->set_state(host->get_state());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kDevice, index);
    key_set_ = keys;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> made = [] {
      std::vector<at::Generator> all;
      for (c10::DeviceIndex i = 0; i < kDevices; i++) all.push_back(at::make_generator<Generator>(i));
      return all;
    }();
    return made[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.attr("devices") = static_cast<int>(kDevices);
  module.def("current_device", [] { return static_cast<int>(current); });
  module.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
  module.def("generator", [](int index) {
    return at::globalContext().defaultGenerator(c10::Device(kDevice, static_cast<c10::DeviceIndex>(index)));
  });
}
