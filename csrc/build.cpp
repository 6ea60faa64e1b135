// The facts of the build, for C++ and as the operators of moe_ext_build for Python.
#include <moe_ext/build.h>
#include <moe_ext/version.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/gemm/kernel_table.h"
#include "cpu/isa.h"
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

namespace {

// The names of the values of enums, in the order of their declaration.
constexpr const char* kTypes[] = {"float64", "float32", "bfloat16", "float16"};
constexpr const char* kVendors[] = {"any", "amd", "intel"};
constexpr const char* kLayouts[] = {"any", "along_n", "along_k"};
constexpr const char* kReadings[] = {"packs", "axpyf", "dotxf"};

template <size_t size>
int64_t index_in(const char* const (&names)[size], const std::string& argument,
                 const std::string& name) {
  const auto* const place = std::find(std::begin(names), std::end(names), name);
  TORCH_CHECK_VALUE(place != std::end(names), argument, " must be a known name, got ", name);
  return place - names;
}

cpu::Isa isa_of(const std::string& name) {
  const cpu::Isa* isa = cpu::isa_named(name.c_str());
  TORCH_CHECK_VALUE(isa != nullptr, "isa must be a known name, got ", name);
  return *isa;
}

// Returns the fields of each rule of selection.h, separated by tabs.
std::vector<std::string> gemm_rules() {
  std::vector<std::string> lines;
  for (const cpu::GemmRule& rule : cpu::gemm_rules()) {
    std::ostringstream line;
    for (size_t type = 0; type < std::size(kTypes); ++type) {
      if ((rule.types >> type & 1) != 0) line << kTypes[type] << ' ';
    }
    line << '\t' << cpu::name_of(rule.isa) << '\t' << kVendors[static_cast<int>(rule.vendor)]
         << '\t' << rule.last_rows << '\t' << kLayouts[static_cast<int>(rule.layout)] << '\t'
         << kReadings[static_cast<int>(rule.reading)] << '\t' << rule.kernels;
    lines.push_back(line.str());
  }
  return lines;
}

int64_t gemm_rule(const std::string& isa, const std::string& type, int64_t rows,
                  const std::string& layout) {
  const auto types = static_cast<cpu::Types>(1U << index_in(kTypes, "type", type));
  const auto layout_of_b = static_cast<cpu::Layout>(index_in(kLayouts, "layout", layout));
  return &cpu::gemm_rule(isa_of(isa), types, rows, layout_of_b) - cpu::gemm_rules().data();
}

std::string preferred_isa(const std::string& vendor, const std::string& highest) {
  const auto vendor_of_processor = static_cast<cpu::Vendor>(index_in(kVendors, "vendor", vendor));
  return cpu::name_of(
      cpu::preferred_isa({.vendor = vendor_of_processor, .highest = isa_of(highest)}));
}

}  // namespace
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
  m.def("gemm_rules() -> str[]", &moe_ext::gemm_rules);
  m.def("gemm_rule(str isa, str type, int rows, str layout) -> int", &moe_ext::gemm_rule);
  m.def("preferred_isa(str vendor, str highest) -> str", &moe_ext::preferred_isa);
  m.def("empty_cache() -> ()", &moe_ext::empty_cache);
  m.def("cached_bytes() -> int", &moe_ext::cached_bytes);
  m.def("cache_limit() -> int", &moe_ext::cache_limit);
}
