// Runs CUDA kernels on the CPU. Emulates the parts of CUDA's language and runtime that csrc/cuda
// uses.
//
// The threads of a block take turns on one CPU thread. Each has its own stack and runs until it
// waits at a barrier. The order of the turns is random, so a missing barrier gives wrong
// results. Blocks run sequentially.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static  // only one block runs at a time
#define __CUDACC_VER_MAJOR__ 0
#define __CUDACC_VER_MINOR__ 0

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;

namespace emulation {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kMostSharedByDefault = 48 << 10;  // of a block, also of its static variables
constexpr size_t kMostShared = 227 << 10;          // on any architecture
constexpr size_t kStackBytes = 64 << 10;
constexpr int kMultiprocessors = 3;  // as kernels see it; few, so that a block has several tiles

// The most shared memory of a block by the major number of the compute capability: the limit of its
// smallest architecture. 8.6, 8.9 and 12.0 have 99 KiB, 8.0 has 163 KiB.
constexpr size_t most_shared(int major) {
  return major == 8 || major == 12 ? 99 << 10 : kMostShared;
}

// Reports an operation that is undefined on a GPU or would hang it.
[[noreturn]] inline void fail(const std::string& what) {
  throw std::logic_error("emulated kernel: " + what);
}

// A point where threads wait for each other.
struct Barrier {
  unsigned num_threads = 0;
  unsigned num_waiting = 0;
  uint64_t num_passed = 0;
  const char* function = nullptr;  // where the threads wait
};

// A copy that a thread has started with cp.async.
struct Copy {
  void* to;
  const void* from;
  size_t num_bytes, num_zeros;

  void run() const {
    // Not memcpy, whose accesses are not counted; see traffic.cpp.
    for (size_t i = 0; i < num_bytes; ++i) {
      static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
    }
    std::memset(static_cast<char*>(to) + num_bytes, 0, num_zeros);
  }
};

struct Thread {
  const std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool started = false;  // its stack is in use; stays true between kernels
  jmp_buf turn;          // the start of the next turn
  bool alive = false;
  const Barrier* waits_for = nullptr;  // waits until its num_passed reaches `until`
  uint64_t until = 0;
  unsigned num_exchanges = 0, num_votes = 0;
  std::vector<std::vector<Copy>> copies;  // a list for each committed group, then the open group
};

struct Warp {
  Barrier barrier{kWarp};
  using Value = std::array<uint64_t, 3>;  // fits what a lane gives to mma
  // The values of the lanes in two consecutive exchanges. No lane can be two exchanges ahead.
  std::array<std::array<Value, kWarp>, 2> values;
};

// The device, which runs one block at a time.
struct Machine {
  std::mutex mutex;  // serializes launches
  std::minstd_rand random;
  int compute_capability = 8;                 // the major one; 8 does not use torch's grouped GEMM
  int64_t torch_release = 0, torch_cuda = 0;  // see torch_build.h
  size_t most_shared = emulation::most_shared(8);  // of a block, if its kernel set a maximum
  std::map<const void*, size_t> most_dynamic;      // shared memory by kernel, if it set a maximum

  // If set, called before a launch with the kernel, and after it with null.
  void (*on_launch)(const void* kernel) = nullptr;

  const std::function<void()>* kernel = nullptr;
  std::vector<Thread> threads = std::vector<Thread>(kMostThreads);
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<char> votes;  // the result of each __syncthreads_or
  alignas(128) std::array<unsigned char, kMostShared> shared;  // the dynamic part
  std::vector<const void*> variables;  // the static part that the block has entered
  size_t static_bytes, dynamic_bytes, most_bytes;

  unsigned current = 0;  // index of the running thread
  jmp_buf scheduler;
  std::exception_ptr error;

  Thread& thread() { return threads[current]; }
  Warp& warp() { return warps[current / kWarp]; }
};

inline Machine the_machine;
inline Machine& machine() { return the_machine; }

inline unsigned char* shared_memory() { return machine().shared.data(); }

inline void poison(void* memory, size_t num_bytes) { std::memset(memory, 0xFF, num_bytes); }  // NaN

// Enters the scope of static shared variables; they have no values when a block enters it first.
template <typename... T>
void enter(T&... variables) {
  Machine& m = machine();
  const auto enter_one = [&](void* variable, size_t num_bytes) {
    if (std::find(m.variables.begin(), m.variables.end(), variable) != m.variables.end()) return;
    m.variables.push_back(variable);
    poison(variable, num_bytes);
    m.static_bytes += num_bytes;
    if (m.static_bytes > kMostSharedByDefault || m.static_bytes + m.dynamic_bytes > m.most_bytes) {
      fail("a block must not use " + std::to_string(m.static_bytes) + " bytes of static and " +
           std::to_string(m.dynamic_bytes) + " bytes of dynamic shared memory");
    }
  };
  (enter_one(&variables, sizeof(T)), ...);
}

inline void end_turn(Thread& thread) {
  if (_setjmp(thread.turn) == 0) _longjmp(machine().scheduler, 1);
}

inline void wait(Barrier& barrier, const char* function) {
  if (barrier.num_waiting == 0) barrier.function = function;
  if (barrier.function != function && std::strcmp(barrier.function, function) != 0) {
    fail(std::string("some threads are in ") + barrier.function + ", others in " + function);
  }
  if (++barrier.num_waiting == barrier.num_threads) {
    barrier.num_waiting = 0;
    ++barrier.num_passed;
    return;
  }
  Thread& self = machine().thread();
  self.waits_for = &barrier;
  self.until = barrier.num_passed + 1;
  end_turn(self);
}

// The values of all lanes of a warp, until the next exchange.
template <typename T>
struct Lanes {
  const std::array<Warp::Value, kWarp>& values;

  T operator[](unsigned lane) const {
    T value;
    std::memcpy(&value, &values[lane], sizeof(T));
    return value;
  }
};

// Returns the values of all lanes of a warp.
template <typename T>
Lanes<T> exchange(unsigned lanes, T value, const char* function) {
  static_assert(sizeof(T) <= sizeof(Warp::Value));
  Warp& warp = machine().warp();
  if (lanes != kAllLanes || warp.barrier.num_threads != kWarp) {
    fail(std::string(function) + " without all lanes of the warp");
  }
  auto& values = warp.values[machine().thread().num_exchanges++ % 2];
  std::memcpy(&values[threadIdx.x % kWarp], &value, sizeof(T));
  wait(warp.barrier, function);
  return {values};
}

// Returns the values of all lanes of a warp, combined by a function of two values.
template <typename T, typename Function>
T reduce(unsigned lanes, T value, const char* function, Function combine) {
  const auto all = exchange(lanes, value, function);
  T result = all[0];
  for (unsigned lane = 1; lane < kWarp; ++lane) result = combine(result, all[lane]);
  return result;
}

// The main loop of a thread's stack: runs kernels in sequence.
inline void run_kernels() {
  Machine& m = machine();
  while (true) {
    try {
      (*m.kernel)();
      if (m.barrier.num_waiting > 0 || m.warp().barrier.num_waiting > 0) {
        fail("a thread has ended, and others wait for it");
      }
    } catch (...) {
      m.error = std::current_exception();
    }
    m.thread().alive = false;
    --m.barrier.num_threads;
    --m.warp().barrier.num_threads;
    end_turn(m.thread());
  }
}

// Runs one turn of a thread.
inline void resume(Thread& thread) {
  if (_setjmp(machine().scheduler) != 0) return;  // the turn is over
  if (std::exchange(thread.started, true)) _longjmp(thread.turn, 1);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_kernels, 0);
  setcontext(&context);
}

// Gives each thread that does not wait one turn, in random order. Skips the warps in left_out (one
// bit per warp). Returns whether any thread had a turn.
inline bool give_turns(unsigned num_threads, unsigned left_out) {
  Machine& m = machine();
  constexpr unsigned kSteps[] = {1, 37, 41, 43, 47, 53, 59, 61};  // coprime to num_threads
  unsigned t = m.random() % num_threads, step = kSteps[m.random() % 8] % num_threads;
  if (m.random() % 2 == 0) step = num_threads - step;  // downwards
  bool any = false;
  for (unsigned i = 0; i < num_threads; ++i) {
    t = t + step < num_threads ? t + step : t + step - num_threads;
    Thread& thread = m.threads[t];
    const Barrier* barrier = thread.waits_for;
    const bool waits = barrier != nullptr && barrier->num_passed < thread.until;
    if (!thread.alive || waits || left_out >> t / kWarp & 1) continue;
    any = true;
    thread.waits_for = nullptr;
    m.current = t;
    threadIdx = dim3(t, 0, 0);
    resume(thread);
    if (m.error) return any;
  }
  return any;
}

inline void run_block(unsigned num_threads, size_t shared_bytes) {
  Machine& m = machine();
  m.barrier = Barrier{num_threads};
  m.warps.assign(num_threads / kWarp, Warp());
  m.votes.clear();
  poison(m.shared.data(), shared_bytes);
  m.variables.clear();
  m.static_bytes = 0;
  m.dynamic_bytes = shared_bytes;
  for (unsigned t = 0; t < num_threads; ++t) {
    Thread& thread = m.threads[t];
    thread.alive = true;
    thread.waits_for = nullptr;
    thread.num_exchanges = thread.num_votes = 0;
    if (thread.copies.size() != 1 || !thread.copies[0].empty()) thread.copies.assign(1, {});
  }
  unsigned left_out = 0;  // paused warps; the other warps get ahead
  while (m.barrier.num_threads > 0) {
    if (m.random() % 64 == 0) left_out = m.random();
    const bool any = give_turns(num_threads, left_out);
    if (m.error) {
      for (Thread& thread : m.threads) thread.started = false;  // the stacks cannot be resumed
      std::rethrow_exception(std::exchange(m.error, nullptr));
    }
    if (!any && left_out == 0) fail("deadlock: every thread of a block waits");
    if (!any) left_out = 0;
  }
}

// Runs kernel<<<blocks, num_threads, shared_bytes, stream>>>(arguments...).
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), dim3 blocks, unsigned num_threads, size_t shared_bytes,
            cudaStream_t, Parameters... arguments) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto set = m.most_dynamic.find(reinterpret_cast<const void*>(kernel));
  const bool is_set = set != m.most_dynamic.end();
  if (shared_bytes > (is_set ? set->second : kMostSharedByDefault)) {
    fail("a block must not use " + std::to_string(shared_bytes) + " bytes of shared memory");
  }
  m.most_bytes = is_set ? m.most_shared : kMostSharedByDefault;
  if (num_threads == 0 || num_threads > kMostThreads || num_threads % kWarp != 0) {
    fail("a block must have a multiple of 32 threads, at most 1024, got " +
         std::to_string(num_threads));
  }
  if (blocks.x > INT32_MAX || blocks.y > UINT16_MAX || blocks.z > UINT16_MAX)
    fail("the grid is too large");
  const std::function<void()> body = [&] { kernel(arguments...); };
  m.kernel = &body;
  gridDim = blocks;
  blockDim = dim3(num_threads);
  if (m.on_launch != nullptr) m.on_launch(reinterpret_cast<const void*>(kernel));
  for (unsigned z = 0; z < blocks.z; ++z) {
    for (unsigned y = 0; y < blocks.y; ++y) {
      for (unsigned x = 0; x < blocks.x; ++x) {
        blockIdx = dim3(x, y, z);
        run_block(num_threads, shared_bytes);
      }
    }
  }
  if (m.on_launch != nullptr) m.on_launch(nullptr);
}

}  // namespace emulation

inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // emulation::launch throws
inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }

enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulation::kMultiprocessors
                                                       : emulation::machine().compute_capability;
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
  if (value < 0 || static_cast<size_t>(value) > emulation::machine().most_shared) {
    return cudaErrorInvalidValue;
  }
  emulation::machine().most_dynamic[reinterpret_cast<const void*>(kernel)] = value;
  return cudaSuccess;
}

inline void __syncthreads() { emulation::wait(emulation::machine().barrier, __func__); }

inline int __syncthreads_or(int predicate) {
  emulation::Machine& m = emulation::machine();
  const unsigned vote = m.thread().num_votes++;
  if (m.votes.size() <= vote) m.votes.resize(vote + 1);
  m.votes[vote] |= predicate != 0;
  emulation::wait(m.barrier, __func__);
  return m.votes[vote];
}

inline void __syncwarp(unsigned lanes = emulation::kAllLanes) {
  emulation::exchange(lanes, 0, __func__);
}

template <typename T>
T __shfl_sync(unsigned lanes, T value, int lane) {
  return emulation::exchange(lanes, value, __func__)[lane % emulation::kWarp];
}

template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  return emulation::exchange(lanes, value, __func__)[(threadIdx.x ^ mask) % emulation::kWarp];
}

template <typename T>
T __reduce_max_sync(unsigned lanes, T value) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  return emulation::reduce(lanes, value, __func__, [](T a, T b) { return max(a, b); });
}

template <typename T>
T __reduce_min_sync(unsigned lanes, T value) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  return emulation::reduce(lanes, value, __func__, [](T a, T b) { return min(a, b); });
}

inline unsigned __reduce_or_sync(unsigned lanes, unsigned value) {
  return emulation::reduce(lanes, value, __func__, std::bit_or());
}

inline unsigned __ballot_sync(unsigned lanes, int predicate) {
  const auto all = emulation::exchange(lanes, predicate != 0, __func__);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < emulation::kWarp; ++lane) bits |= unsigned{all[lane]} << lane;
  return bits;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <typename T>
T atomicAdd(T* sum, T value) {
  return std::exchange(*sum, *sum + value);
}
