// The facts of the build, for C++ and as the operators of moe_ext_build for Python.
#include <moe_ext/build.h>
#include <moe_ext/version.h>
#include <torch/library.h>
#include <torch/version.h>

#include "cpu/memory.h"
#include "errors.h"
#include "kernels/machine.h"

namespace moe_ext {

std::string version() { return MOE_EXT_VERSION; }
std::string torch_version() { return TORCH_VERSION; }
std::string compiler() { return __VERSION__; }
std::string isa() {
  return with_value_errors([] { return std::string(cpu::isa_name()); });
}
void empty_cache() { with_value_errors(cpu::empty_cache); }
int64_t cached_bytes() { return with_value_errors(cpu::cached_bytes); }
int64_t cache_limit() { return with_value_errors(cpu::cache_limit); }

std::optional<std::string> cuda_version() {
#ifdef MOE_EXT_CUDA
  return cuda::toolkit_version();
#else
  return std::nullopt;
#endif
}

std::map<std::string, std::string> products() {
  const auto names = with_value_errors(cpu::product_names);
  return {{"float64", names.float64},
          {"float32", names.float32},
          {"bfloat16", names.bfloat16},
          {"float16", names.float16}};
}

}  // namespace moe_ext

TORCH_LIBRARY(moe_ext_build, m) {
  m.def("torch_version() -> str", &moe_ext::torch_version);
  m.def("cuda_version() -> str?", &moe_ext::cuda_version);
  m.def("compiler() -> str", &moe_ext::compiler);
  m.def("isa() -> str", &moe_ext::isa);
  m.def("products() -> Dict(str, str)", [] {
    c10::Dict<std::string, std::string> products;
    for (const auto& [type, name] : moe_ext::products()) products.insert(type, name);
    return products;
  });
  m.def("empty_cache() -> ()", &moe_ext::empty_cache);
  m.def("cached_bytes() -> int", &moe_ext::cached_bytes);
  m.def("cache_limit() -> int", &moe_ext::cache_limit);
}
