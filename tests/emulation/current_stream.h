// Replaces csrc/current_stream.h: the memory for intermediate results is the CPU's.
#pragma once

#include <vector>

#include "kernels/types.h"
#include "tensor.h"

namespace moe_ext {

class CurrentStream {
 public:
  CudaStream stream() { return {.handle = nullptr, .allocate = allocate, .owner = this}; }

 private:
  static void* allocate(void* owner, size_t num_bytes) {
    auto& memory = static_cast<CurrentStream*>(owner)->memory_;
    memory.push_back(at::empty({static_cast<int64_t>(num_bytes)}, at::kByte));
    return memory.back().mutable_data_ptr();
  }

  std::vector<Tensor> memory_;
};

}  // namespace moe_ext
