// The checks of an activation.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "checks.h"
#include "math/activation.h"

namespace moe_ext {

// Checks the numbers of an activation. In float32 they must not round to 0 or infinity.
inline void check_activation_args(const char* op, std::string_view activation, bool has_args,
                                  at::ArrayRef<double> args) {
  TORCH_CHECK_VALUE(args.size() == (has_args ? 3 : 0), op, ": activation_args must be ",
                    has_args ? "limit, alpha and offset" : "empty", " for ", activation, ", got ",
                    args);
  for (const double number : args) {
    using Float = std::numeric_limits<float>;
    const double size = std::abs(number);
    TORCH_CHECK_VALUE(size == 0 || (size >= Float::min() && size <= Float::max()), op,
                      ": activation_args must be numbers of float32, got ", args);
  }
  TORCH_CHECK_VALUE(args.empty() || args[0] > 0, op,
                    ": activation_args must start with a limit above 0, got ", args);
}

// Returns whether the activation is gated; the layer before a gated activation has twice its width.
inline bool check_activation(const char* op, std::string_view activation,
                             at::ArrayRef<double> args) {
  std::optional<bool> gated;
  math::for_each_activation([&](std::string_view name, auto each) {
    if (name != activation) return;
    gated = each.kGated;
    check_activation_args(op, name, each.kHasArgs, args);
  });
  if (gated) return *gated;
  std::string names;
  math::for_each_activation([&](std::string_view name, auto) { append_name(names, name); });
  TORCH_CHECK_VALUE(false, op, ": activation must be one of ", names, ", got '", activation, "'");
}

}  // namespace moe_ext
