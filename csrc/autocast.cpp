// Under autocast the gate's arithmetic stays in float32 and the experts' products take the lower
// type.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <tuple>

#include "checks.h"

namespace moe_ext {
namespace {

// Calls an operator below autocast; `Op` names it, `Signature` is its C++ type.
template <typename Signature, typename... Args>
auto redispatch(const char* name, c10::DeviceType device, Args&&... args) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(
      std::forward<Args>(args)...);
}

template <c10::DeviceType device>
auto noisy_topk_gating_autocast(const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev,
                                const OptionalTensor& noise, c10::SymInt k, double noise_epsilon) {
  const auto wide = [](const auto& tensor) {
    return at::autocast::cached_cast(at::kFloat, tensor, device);
  };
  return redispatch<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, c10::SymInt, double)>(
      "moe_ext::noisy_topk_gating", device, wide(clean_logits), wide(raw_noise_stddev), wide(noise),
      std::move(k), noise_epsilon);
}

template <c10::DeviceType device>
Tensor load_autocast(const Tensor& clean_logits, const Tensor& noise_stddev,
                     const Tensor& threshold, const Tensor& expert_index) {
  const auto wide = [](const Tensor& tensor) {
    return at::autocast::cached_cast(at::kFloat, tensor, device);
  };
  return redispatch<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
      "moe_ext::load", device, wide(clean_logits), wide(noise_stddev), wide(threshold),
      expert_index);
}

template <c10::DeviceType device>
Tensor grouped_linear_autocast(const Tensor& rows, const Tensor& weight, const OptionalTensor& bias,
                               const Tensor& offsets) {
  const auto type = at::autocast::get_autocast_dtype(device);
  const auto narrow = [type](const auto& tensor) {
    return at::autocast::cached_cast(type, tensor, device);
  };
  return redispatch<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&)>(
      "moe_ext::grouped_linear", device, narrow(rows), narrow(weight), narrow(bias), offsets);
}

template <c10::DeviceType device>
void register_for(torch::Library& m) {
  m.impl("noisy_topk_gating", &noisy_topk_gating_autocast<device>);
  m.impl("load", &load_autocast<device>);
  m.impl("grouped_linear", &grouped_linear_autocast<device>);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, AutocastCPU, m) { moe_ext::register_for<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(moe_ext, AutocastCUDA, m) { moe_ext::register_for<c10::DeviceType::CUDA>(m); }
