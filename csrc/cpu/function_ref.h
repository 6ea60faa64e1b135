// A reference to a function object, which must outlive it.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace moe_ext::cpu {

template <typename Signature>
class FunctionRef;

template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  FunctionRef(std::nullptr_t) {}
  template <typename Function>
  requires(!std::same_as<std::remove_cvref_t<Function>, FunctionRef>)
      FunctionRef(const Function& function)
      : function_(std::addressof(function)),
        call_([](const void* function, Arguments... arguments) -> Result {
          return (*static_cast<const Function*>(function))(std::forward<Arguments>(arguments)...);
        }) {}

  explicit operator bool() const { return call_ != nullptr; }
  Result operator()(Arguments... arguments) const {
    return call_(function_, std::forward<Arguments>(arguments)...);
  }

 private:
  const void* function_ = nullptr;
  Result (*call_)(const void*, Arguments...) = nullptr;
};

}  // namespace moe_ext::cpu
