// The errors of the kernels, which do not know torch.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>

namespace moe_ext {

// Returns body(); throws c10::ValueError, a ValueError of Python, for std::invalid_argument.
template <typename Body>
auto with_value_errors(const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace moe_ext
