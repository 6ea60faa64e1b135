// Operators that test the emulation: set_device selects the compute capability. A kernel of
// broken_kernel may have a bug, which the emulation must detect. The kernel of use_shared_memory
// has 1 KiB of static and some dynamic shared memory.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <cuda_pipeline.h>
#include <torch/library.h>

#include <cub/block/block_scan.cuh>

namespace {

using at::Tensor;

constexpr int kThreads = 256;

template <bool kBroken>
__global__ void barrier_kernel(const float* in, float* out) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = in[threadIdx.x];
  if (!kBroken) __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

template <bool kBroken>
__global__ void unset_kernel(const float* in, float* out) {
  __shared__ float values[kThreads];
  if (!kBroken) values[threadIdx.x] = 0;
  out[threadIdx.x] = in[threadIdx.x] + values[threadIdx.x];
}

// If broken, a thread that is ahead overwrites values that other threads have not added yet.
template <bool kBroken>
__global__ void reuse_kernel(const float* in, float* out) {
  using Scan = cub::BlockScan<float, kThreads>;
  __shared__ Scan::TempStorage space;
  float before = 0, of_zeros = 0;
  Scan(space).ExclusiveSum(in[threadIdx.x], before);
  if (!kBroken) __syncthreads();
  Scan(space).ExclusiveSum(0, of_zeros);
  out[threadIdx.x] = before + of_zeros;
}

template <bool kBroken>
__global__ void copy_kernel(const float* in, float* out) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = 0;
  __pipeline_memcpy_async(values + threadIdx.x, in + threadIdx.x, sizeof(float));
  __pipeline_commit();
  __pipeline_wait_prior(kBroken ? 1 : 0);
  out[threadIdx.x] = values[threadIdx.x];
}

template <bool kBroken>
__global__ void lanes_kernel(const float* in, float* out) {
  if (kBroken && threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(emulation::kAllLanes, in[threadIdx.x], 1);
}

template <bool kBroken>
__global__ void branch_kernel(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (kBroken && threadIdx.x < 32) {
    __syncthreads_or(0);
  } else {
    __syncthreads();
  }
}

Tensor run(const Tensor& in, const std::string& kernel, bool broken) {
  const std::map<std::string, std::array<void (*)(const float*, float*), 2>> kernels{
      {"barrier", {barrier_kernel<false>, barrier_kernel<true>}},
      {"unset", {unset_kernel<false>, unset_kernel<true>}},
      {"reuse", {reuse_kernel<false>, reuse_kernel<true>}},
      {"copy", {copy_kernel<false>, copy_kernel<true>}},
      {"lanes", {lanes_kernel<false>, lanes_kernel<true>}},
      {"branch", {branch_kernel<false>, branch_kernel<true>}},
  };
  Tensor out = at::empty_like(in);
  emulation::launch<const float*, float*>(kernels.at(kernel)[broken], 1, kThreads, 0, nullptr,
                                          in.const_data_ptr<float>(),
                                          out.mutable_data_ptr<float>());
  return out;
}

__global__ void static_kernel() {
  __shared__ float values[kThreads];
  values[threadIdx.x] = 0;
}

void use_shared_memory(int64_t dynamic_bytes) {
  emulation::machine().most_dynamic.erase(reinterpret_cast<const void*>(static_kernel));
  if (static_cast<size_t>(dynamic_bytes) > emulation::kMostSharedByDefault) {
    const auto error =
        cudaFuncSetAttribute(static_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(dynamic_bytes));
    TORCH_CHECK(error == cudaSuccess,
                "emulated: cudaFuncSetAttribute: ", cudaGetErrorString(error));
  }
  emulation::launch<>(static_kernel, 1, kThreads, dynamic_bytes, nullptr);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moe_ext_emulated, m) {
  m.def("set_device(int major) -> ()", [](int64_t major) {
    emulation::machine().compute_capability = static_cast<int>(major);
    emulation::machine().most_shared = emulation::most_shared(static_cast<int>(major));
  });
  m.def("set_torch(int release, int cuda) -> ()", [](int64_t release, int64_t cuda) {
    emulation::machine().torch_release = release;
    emulation::machine().torch_cuda = cuda;
  });
  m.def("use_shared_memory(int dynamic_bytes) -> ()", &use_shared_memory);
  m.def("broken_kernel(Tensor input, str kernel, bool broken) -> Tensor", &run);
}
