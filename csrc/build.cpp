// The facts of the build.
#include <moe_ext/build.h>
#include <moe_ext/version.h>
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
#ifdef MOE_EXT_CUDA_VERSION
  return MOE_EXT_CUDA_VERSION;
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
