// A device for tests: host memory that torch takes for an accelerator (PrivateUse1), with streams that are late on
// purpose.
//
// A stream is a thread. It runs its operations in order, each not before a random time has passed, unless somebody
// waits for it. Memory holds NaN when it is handed out, and again when it is given back, in its own stream's turn:
// whoever reads before a copy is done, or after a buffer was freed, reads NaN. Operators run on the CPU; what they
// compute appears in the current stream's turn. There are two such devices in a process.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "late_streams.hpp"

namespace {

using namespace late;

// ---- memory

struct Allocation {
  std::size_t n_bytes;
  int device;
  int64_t stream;  // where it was handed out
  std::map<int64_t, uint64_t> used_on;
};

std::mutex memory_mutex;
auto* const allocations = new std::map<void*, Allocation>();
auto* const pinned = new std::map<const char*, std::size_t>();
std::size_t n_allocated[kDevices] = {};
std::size_t device_limit = SIZE_MAX, pinned_limit = SIZE_MAX, n_pinned = 0;

void give_back(void* memory) {
  if (memory == nullptr) return;
  Allocation allocation;
  {
    std::lock_guard lock(memory_mutex);
    allocation = allocations->at(memory);
    allocations->erase(memory);
    n_allocated[allocation.device] -= allocation.n_bytes;
  }
  // As a caching allocator does: in its own stream's turn, and for other streams only where they were recorded. The
  // pages are kept: who reads them too late has to find NaN.
  stream_at(allocation.device, allocation.stream).enqueue([memory, allocation] {
    for (const auto& [stream, place] : allocation.used_on) stream_at(allocation.device, stream).wait(place);
    std::memset(memory, 0xFF, allocation.n_bytes);
  });
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t n) override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device));
    if (n == 0) return {nullptr, nullptr, &give_back, device};
    std::lock_guard lock(memory_mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, n_allocated[current_device] + n <= device_limit, "late device out of memory");
    void* const memory = std::aligned_alloc(256, (n + 255) / 256 * 256);
    std::memset(memory, 0xFF, n);
    (*allocations)[memory] = {n, current_device, current_stream[current_device], {}};
    n_allocated[current_device] += n;
    return {memory, memory, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator)

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t n) override {
    std::lock_guard lock(memory_mutex);
    TORCH_CHECK(n_pinned + n <= pinned_limit, "late device: no more memory can be pinned");
    void* const memory = std::aligned_alloc(256, (n + 256) / 256 * 256);
    std::memset(memory, 0xFF, n);
    (*pinned)[static_cast<char*>(memory)] = n + 1;
    n_pinned += n;
    return {memory, memory, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* memory) {
    std::lock_guard lock(memory_mutex);
    n_pinned -= pinned->at(static_cast<char*>(memory)) - 1;
    pinned->erase(static_cast<char*>(memory));
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard lock(memory_mutex);
  const char* const memory = static_cast<const char*>(data);
  auto after = pinned->upper_bound(memory);
  return after != pinned->begin() && memory < (--after)->first + after->second;
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream(int index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(index), id); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device(current_device); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(std::exchange(current_device, index_of(to)));
  }
  void setDevice(c10::Device to) const override { current_device = index_of(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = index_of(to); }

  c10::Stream getStream(c10::Device of) const override { return stream(index_of(of), current_stream[index_of(of)]); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index_of(of), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return stream(index_of(of), new_stream(index_of(of)));
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return stream(index_of(of), new_stream(index_of(of)));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(to.device_index(), std::exchange(current_stream[to.device_index()], to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream of) const override { return reinterpret_cast<void*>(of.id()); }
  bool queryStream(const c10::Stream& of) const override { return stream_at(of).has_passed(stream_at(of).end()); }
  void synchronizeStream(const c10::Stream& of) const override { wait_on_host(stream_at(of), stream_at(of).end()); }
  void synchronizeDevice(const c10::DeviceIndex of) const override {
    std::size_t n;
    {
      std::lock_guard lock(streams_mutex);
      n = streams[of].size();
    }
    for (std::size_t id = 0; id < n; ++id) wait_on_host(stream_at(of, id), stream_at(of, id).end());
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    delete static_cast<Event*>(*event);
    if (flag != c10::EventFlag::BACKEND_DEFAULT) {  // torch.Event(enable_timing=False)
      *event = new Event{on, stream_at(on).end()};
      return;
    }
    auto passed = std::make_shared<Clock::time_point>();
    *event = new Event{on, stream_at(on).enqueue([passed] { *passed = Clock::now(); }), passed};
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const Event &first = *static_cast<Event*>(from), &last = *static_cast<Event*>(to);
    for (const Event* event : {&first, &last})
      TORCH_CHECK(event->passed && stream_at(event->stream).has_passed(event->place), "late device: an event to come");
    return std::chrono::duration<double, std::milli>(*last.passed - *first.passed).count();
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event == nullptr) return;
    const Event awaited = *static_cast<Event*>(event);
    if (awaited.stream == waiting) return;
    stream_at(waiting).enqueue([awaited] { stream_at(awaited.stream).wait(awaited.place); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    return stream_at(static_cast<Event*>(event)->stream).has_passed(static_cast<Event*>(event)->place);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event awaited = *static_cast<Event*>(event);
    wait_on_host(stream_at(awaited.stream), awaited.place);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    const uint64_t end = stream_at(on).end();
    std::lock_guard lock(memory_mutex);
    const auto found = allocations->find(data.get());
    if (found != allocations->end()) found->second.used_on[on.id()] = end;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex to) const override { current_device = to; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device, static_cast<int>(to)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return to < 0 ? to : exchangeDevice(to); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return Guard::device(current_device); }
};

// ---- operators

at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Guard::device(current_device)));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Guard::device(current_device)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

thread_local bool is_in_operator = false;

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const int device = (self.is_cpu() ? dst : self).device().index();
  Stream& stream = stream_of(device);
  const bool is_between_devices = !self.is_cpu() && !dst.is_cpu() && self.device() != dst.device();
  if (is_between_devices) {
    Stream& other = stream_of(dst.device().index());
    stream.enqueue([&other, end = other.end()] { other.wait(end); });
  }
  // Device memory by its address alone, which its owner has to keep; host memory by a reference, as torch's allocator
  // of pinned memory keeps what a copy still reads.
  const uint64_t place =
      stream.enqueue([from = on_host(self), to = on_host(dst)]() mutable { at::native::copy_(to, from, false); });
  if (is_between_devices) stream_of(dst.device().index()).enqueue([&stream, place] { stream.wait(place); });
  if (is_in_operator && self.is_cpu()) return dst;  // an operator's result comes in its stream's turn
  const bool touches_host = self.is_cpu() || dst.is_cpu();
  const bool is_free = non_blocking && is_pinned((self.is_cpu() ? self : dst).const_data_ptr());
  if (touches_host && !is_free) wait_on_host(stream, place);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}

at::Scalar read_scalar(const at::Tensor& self) {
  Stream& stream = stream_of(self.device().index());
  wait_on_host(stream, stream.end());
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Scope {
    bool before = std::exchange(is_in_operator, true);
    ~Scope() { is_in_operator = before; }
  } scope;
  at::native::cpu_fallback(op, stack);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided",
         [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
            std::optional<c10::SymInt> offset) { return at::cpu::as_strided_symint(self, size, stride, offset); });
  m.impl("resize_",
         [](const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format)
             -> const at::Tensor& { return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format); });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(self, source);
  });
  m.impl("set_.source_Storage",
         [](at::Tensor& self, at::Storage source) -> at::Tensor& { return at::native::set_(self, source); });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
            c10::IntArrayRef stride) -> at::Tensor& { return at::cpu::set_(self, source, offset, size, stride); });
  m.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_lateness_us", [](int us) { lateness_us = us; });
  m.def("set_stream_lateness_us", [](int device, int64_t id, int us) { stream_at(device, id).be_late(us); });
  m.def("set_limits", [](std::size_t device, std::size_t pinned) {
    std::lock_guard lock(memory_mutex);
    device_limit = device;
    pinned_limit = pinned;
  });
  m.def("allocated_bytes", [](int device) {
    std::lock_guard lock(memory_mutex);
    return n_allocated[device];
  });
  m.def("pinned_bytes", [] {
    std::lock_guard lock(memory_mutex);
    return n_pinned;
  });
  m.def("n_waits_here", [] { return n_waits_here; });
  m.def("n_waits_with_gil", [] { return n_waits_with_gil.load(); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = device; });
  // Run a Python function in a stream's turn.
  m.def("enqueue", [](int device, int64_t id, pybind11::object function) {
    auto* const kept = new pybind11::object(std::move(function));
    stream_at(device, id).enqueue([kept] {
      pybind11::gil_scoped_acquire locked;
      try {
        (*kept)();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "late device: %s\n", error.what());
      }
      delete kept;
    });
  });
}
