// The grouped GEMM of QuACK (quack-kernels on PyPI), for MOE_EXT_GROUPED_MM=quack. It has never run
// on a GPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../tensor.h"

namespace moe_ext {

// Computes out = a b for groups with bounds [E + 1], int32. `lengths` is the argument of QuACK that
// takes them. With "cu_seqlens_m" the rows of a belong to groups: a [R, K], b [E, K, N], out [R,
// N]. With "cu_seqlens_k" its columns do: a [M, R], b [R, N], out [E, M, N].
inline void quack_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const char* lengths,
                       const Tensor& bounds) {
  const auto gemm = c10::Dispatcher::singleton().findSchema({"quack::gemm_out", ""});
  TORCH_CHECK(gemm,
              "MOE_EXT_GROUPED_MM=quack needs quack-kernels: import quack.gemm_interface first");
  // Tuning would wait for the device.
  std::vector<std::pair<std::string, c10::IValue>> given{
      {"A", a}, {"B", b}, {"out", out}, {lengths, bounds}, {"tuned", false}};
  torch::jit::Stack arguments;
  for (const c10::Argument& argument : gemm->schema().arguments()) {
    const auto place = std::find_if(given.begin(), given.end(), [&](const auto& each) {
      return each.first == argument.name();
    });
    TORCH_CHECK(place != given.end() || argument.default_value(),
                "quack::gemm_out: found an unknown argument ", argument.name());
    arguments.push_back(place == given.end() ? *argument.default_value() : place->second);
    if (place != given.end()) given.erase(place);
  }
  TORCH_CHECK(given.empty(), "quack::gemm_out: found no argument ", given[0].first);
  gemm->callBoxed(arguments);
}

}  // namespace moe_ext
