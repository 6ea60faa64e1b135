// The activation of the experts, chosen by its name.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "../kernels/types.h"
#include "region.h"

namespace moe_ext::cpu {

// Activate and ActivateBackward (elementwise.h) for one activation.
template <typename scalar_t>
struct ActivationFunction {
  using acc_t = acc_type<scalar_t>;

  // `args` are the numbers of the activation, if it has any.
  ActivationFunction(std::string_view name, std::span<const double> args);

  std::function<void(const scalar_t* z, Region region, int64_t width, scalar_t* out)> activate;
  std::function<void(const scalar_t* z, const acc_t* sums, int64_t ld, Region region, int64_t width,
                     acc_t* grad_z)>
      activate_backward;
  bool interleaved = false;  // see math/activation.h
};

}  // namespace moe_ext::cpu
