// Facts of the build and of this machine, as `python -m moe_ext.info` prints them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "export.h"

namespace moe_ext {

// The version of moe_ext, such as "0.1.0".
MOE_EXT_API std::string version();

// The version of torch that the library was compiled for, such as "2.15.0". It runs with that
// minor version alone.
MOE_EXT_API std::string torch_version();

// The version of CUDA that the library was compiled for; absent without CUDA kernels.
MOE_EXT_API std::optional<std::string> cuda_version();

// The version of the compiler, such as "12.2.0".
MOE_EXT_API std::string compiler();

// The instruction set of the CPU kernels, such as "avx512_bf16". The environment variable
// MOE_EXT_ISA selects a lower one. Throws c10::ValueError if that variable names no instruction set
// of this processor.
MOE_EXT_API std::string isa();

// The GEMM implementation of each dtype on the CPU: for example, "float32" has "AVX-512".
MOE_EXT_API std::map<std::string, std::string> products();

// Returns the cached memory of freed CPU tensors to the operating system.
MOE_EXT_API void empty_cache();

// The bytes of freed CPU tensors that are cached now. torch's profiler counts them as freed.
MOE_EXT_API int64_t cached_bytes();

// The most bytes that are cached: a quarter of the machine's memory, or the environment variable
// MOE_EXT_CACHE_BYTES, where 0 disables the cache. It is 0 where the cache does not exist: outside
// Linux. Throws c10::ValueError if that variable is not a number of bytes.
MOE_EXT_API int64_t cache_limit();

}  // namespace moe_ext
