// Looks up an operator of this library by name, to call it through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace moe_ext {

// `Signature` is the operator's C++ type. Keep the result in a static variable: the lookup takes a
// lock.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace moe_ext
