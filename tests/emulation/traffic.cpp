// Counts the bytes of tensors that emulated kernels and torch's operators read and write.
//
// The compiler inserts a call before each access to memory, for AddressSanitizer in a kernel of an
// operating system (-fsanitize=kernel-address). Here these functions mark the bytes of tensors. A
// byte that a kernel reads several times counts once, as if the caches were infinite.
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <set>

namespace {

constexpr size_t kArenaBytes = 64 << 20;
constexpr unsigned char kRead = 1, kWritten = 2;
alignas(64) unsigned char arena[kArenaBytes];  // the memory of all tensors
unsigned char marks[kArenaBytes];
size_t num_used = 0;       // bytes of the arena
bool in_kernel = false;    // accesses are counted
int num_calls = 0;         // of torch's operators that have not returned
std::string lines;         // name, bytes read, bytes written
at::Allocator* allocator;  // of torch
at::CallbackHandle callback;

// Gives memory that is never used again, so that every tensor has its own bytes.
struct ArenaAllocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    unsigned char* const memory = arena + num_used;
    num_used += (num_bytes + 63) / 64 * 64;
    TORCH_CHECK(num_used <= kArenaBytes, "the tensors need more than ", kArenaBytes, " bytes");
    return {memory, memory, raw_deleter(), at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return [](void*) {};
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
} arena_allocator;

void add_line(const std::string& name, int64_t num_read, int64_t num_written) {
  lines += name + " " + std::to_string(num_read) + " " + std::to_string(num_written) + "\n";
}

// Begins a kernel, or ends the last one. A kernel has the name @offset, its place in the library.
void on_launch(const void* kernel) {
  static const void* current = nullptr;
  in_kernel = kernel != nullptr;
  if (in_kernel) {
    current = kernel;
    std::fill_n(marks, num_used, 0);
    return;
  }
  Dl_info library;
  TORCH_CHECK(dladdr(current, &library) != 0, "the kernel is in no library");
  const auto offset = static_cast<const char*>(current) - static_cast<char*>(library.dli_fbase);
  int64_t num_read = 0, num_written = 0;
  for (size_t i = 0; i < num_used; ++i) {
    num_read += (marks[i] & kRead) != 0;
    num_written += (marks[i] & kWritten) != 0;
  }
  add_line("@" + std::to_string(offset), num_read, num_written);
}

// A call of an operator of torch.
struct Call : at::ObserverContext {
  int64_t num_read = 0;
  std::set<const void*> storages;  // of the arguments
};

std::unique_ptr<at::ObserverContext> begin_call(const at::RecordFunction& function) {
  if (std::string_view(function.name()).substr(0, 6) != "aten::") return nullptr;
  ++num_calls;
  auto call = std::make_unique<Call>();
  for (const c10::IValue& value : function.inputs()) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    call->num_read += static_cast<int64_t>(value.toTensor().nbytes());
    call->storages.insert(value.toTensor().storage().data());
  }
  return call;
}

// Adds an operator that no other one has called: its arguments are read, and its results are
// written. Views, and results without values, move no bytes.
void end_call(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr || --num_calls > 0) return;
  const auto* call = static_cast<Call*>(context);
  const bool in_place = std::string_view(function.name()).back() == '_';
  int64_t num_written = 0;
  for (const c10::IValue& value : function.outputs()) {
    if (!value.isTensor()) continue;
    if (!in_place && call->storages.count(value.toTensor().storage().data()) > 0) continue;
    num_written += static_cast<int64_t>(value.toTensor().nbytes());
  }
  const bool is_empty = std::string_view(function.name()).substr(0, 11) == "aten::empty";
  if (num_written > 0 && !is_empty) add_line(function.name(), call->num_read, num_written);
}

// Starts to count; from now on, new tensors are in the arena.
void start_counting() {
  num_used = 0;
  lines.clear();
  allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&arena_allocator);
  emulation::machine().on_launch = on_launch;
  callback = at::addThreadLocalCallback(at::RecordFunctionCallback(begin_call, end_call)
                                            .scopes({at::RecordScope::FUNCTION})
                                            .needsInputs(true)
                                            .needsOutputs(true));
}

// Returns what was counted since the last call: a line for each kernel and operator of torch.
std::string counts() { return std::exchange(lines, ""); }

void stop_counting() {
  at::removeCallback(callback);
  emulation::machine().on_launch = nullptr;
  c10::SetCPUAllocator(allocator);
}

}  // namespace

// The functions that the compiler calls; they are not counted themselves.
#define UNCOUNTED __attribute__((no_sanitize("kernel-address")))

UNCOUNTED static void mark(uintptr_t address, size_t num_bytes, unsigned char how) {
  const uintptr_t place = address - reinterpret_cast<uintptr_t>(arena);
  if (!in_kernel || place >= kArenaBytes) return;
  for (size_t i = 0; i < num_bytes; ++i) marks[place + i] |= how;
}

extern "C" {
#define MARK(bytes)                                                                               \
  UNCOUNTED void __asan_load##bytes##_noabort(uintptr_t address) { mark(address, bytes, kRead); } \
  UNCOUNTED void __asan_store##bytes##_noabort(uintptr_t address) {                               \
    mark(address, bytes, kWritten);                                                               \
  }
MARK(1)
MARK(2)
MARK(4)
MARK(8)
MARK(16)
UNCOUNTED void __asan_loadN_noabort(uintptr_t address, size_t num_bytes) {
  mark(address, num_bytes, kRead);
}
UNCOUNTED void __asan_storeN_noabort(uintptr_t address, size_t num_bytes) {
  mark(address, num_bytes, kWritten);
}
UNCOUNTED void __asan_handle_no_return() {}
UNCOUNTED void __asan_before_dynamic_init(const char*) {}
UNCOUNTED void __asan_after_dynamic_init() {}
}

TORCH_LIBRARY_FRAGMENT(moe_ext_emulated, m) {
  m.def("start_counting() -> ()", &start_counting);
  m.def("counts() -> str", &counts);
  m.def("stop_counting() -> ()", &stop_counting);
}
