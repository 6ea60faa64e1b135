// The stream of CUDA on which torch works, for the kernels.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

#include "kernels/types.h"
#include "tensor.h"

namespace moe_ext {

// The memory for intermediate results comes from torch's allocator. It is free again for later work
// on the stream when this object is destroyed.
class CurrentStream {
 public:
  CudaStream stream() {
    const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
    return {.handle = cuda.getStream(cuda.getDevice()).native_handle(),
            .allocate = allocate,
            .owner = this};
  }

 private:
  static void* allocate(void* owner, size_t num_bytes) {
    auto& memory = static_cast<CurrentStream*>(owner)->memory_;
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    memory.push_back(at::empty({static_cast<int64_t>(num_bytes)}, options));
    return memory.back().mutable_data_ptr();
  }

  std::vector<Tensor> memory_;
};

}  // namespace moe_ext
