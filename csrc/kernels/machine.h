// What the kernels use on this machine.
#pragma once

#include "export.h"

namespace moe_ext::cpu {

// The instruction set, such as "avx512_bf16". Throws std::invalid_argument if MOE_EXT_ISA names
// none, or one that this processor lacks.
MOE_EXT_KERNEL_API const char* isa_name();

// The GEMM micro-kernels of each type, such as "AVX-512".
struct ProductNames {
  const char *float64, *float32, *bfloat16, *float16;
};
MOE_EXT_KERNEL_API ProductNames product_names();

}  // namespace moe_ext::cpu

namespace moe_ext::cuda {

// The version of the toolkit that compiled the kernels, such as "13.0".
MOE_EXT_KERNEL_API const char* toolkit_version();

// The major compute capability of the current device.
MOE_EXT_KERNEL_API int compute_capability();

}  // namespace moe_ext::cuda
