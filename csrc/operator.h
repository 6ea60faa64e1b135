// An operator of this library, found by name and called through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace moe_ext {

// `Signature` is the operator's C++ type. To be kept in a static: the search takes a lock.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace moe_ext
