// Autocast: gating and load run in float32, the GEMMs of the experts, of the cross-entropy
// and of the LSTM in autocast's lower-precision type.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <tuple>

#include "experts_arguments.h"
#include "find_operator.h"
#include "implement.h"
#include "linear_cross_entropy_arguments.h"
#include "lstm_arguments.h"

namespace moe_ext {
namespace {

using at::autocast::cached_cast;

// Excludes the autocast key during its lifetime.
template <c10::DeviceType device>
struct BelowAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{
      at::autocast::get_autocast_dispatch_key_from_device_type(device)};
};

template <c10::DeviceType device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gating(
    const Tensor& clean_logits, const OptionalTensor& raw_noise_stddev, const OptionalTensor& noise,
    c10::SymInt k, double noise_epsilon) {
  const BelowAutocast<device> guard;
  static const auto op =
      find_operator<decltype(noisy_topk_gating<device>)>("moe_ext::noisy_topk_gating");
  return op.call(cached_cast(at::kFloat, clean_logits, device),
                 cached_cast(at::kFloat, raw_noise_stddev, device),
                 cached_cast(at::kFloat, noise, device), std::move(k), noise_epsilon);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> topk_routing(const Tensor& logits, c10::SymInt k,
                                        const OptionalTensor& bias, std::string_view score,
                                        bool renormalize, double scale, c10::SymInt num_groups,
                                        c10::SymInt groups_per_token, c10::SymInt group_score_k,
                                        const OptionalTensor& expert_index) {
  const BelowAutocast<device> guard;
  static const auto op = find_operator<decltype(topk_routing<device>)>("moe_ext::topk_routing");
  return op.call(cached_cast(at::kFloat, logits, device), std::move(k),
                 cached_cast(at::kFloat, bias, device), score, renormalize, scale,
                 std::move(num_groups), std::move(groups_per_token), std::move(group_score_k),
                 expert_index);
}

template <c10::DeviceType device>
Tensor load(const Tensor& clean_logits, const Tensor& noise_stddev, const Tensor& threshold,
            const Tensor& expert_index, const OptionalTensor& group_offsets) {
  const BelowAutocast<device> guard;
  static const auto op = find_operator<decltype(load<device>)>("moe_ext::load");
  return op.call(cached_cast(at::kFloat, clean_logits, device),
                 cached_cast(at::kFloat, noise_stddev, device),
                 cached_cast(at::kFloat, threshold, device), expert_index, group_offsets);
}

template <c10::DeviceType device>
ExpertsOutputs experts(const Tensor& x, const Routing& routing, const FeedForward& network,
                       bool keep_hidden) {
  const BelowAutocast<device> guard;
  const auto type = at::autocast::get_autocast_dtype(device);
  const auto weights =
      network.packed ? network.weights.vec() : cached_cast(type, network.weights, device);
  const auto biases = cached_cast(type, network.biases, device);
  const auto lora_a = cached_cast(type, network.lora.a, device);
  const auto lora_b = cached_cast(type, network.lora.b, device);
  FeedForward cast = network;
  cast.weights = weights;
  cast.biases = biases;
  cast.lora.a = lora_a;
  cast.lora.b = lora_b;
  return call_experts(cached_cast(type, x, device), routing, cast, keep_hidden);
}

template <c10::DeviceType device>
LinearCrossEntropyOutputs linear_cross_entropy(const Classifier& classifier,
                                               const LossOptions& options,
                                               const c10::List<bool>& keep_gradients) {
  const BelowAutocast<device> guard;
  const auto type = at::autocast::get_autocast_dtype(device);
  const Tensor input = cached_cast(type, classifier.input, device);
  const Tensor weight = cached_cast(type, classifier.weight, device);
  const OptionalTensor bias = cached_cast(at::kFloat, classifier.bias, device);
  return call_linear_cross_entropy(
      {.input = input, .weight = weight, .target = classifier.target, .bias = bias}, options,
      keep_gradients);
}

template <c10::DeviceType device>
LstmOutputs lstm(const Lstm& lstm) {
  const BelowAutocast<device> guard;
  const auto type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const auto& tensor) { return cached_cast(type, tensor, device); };
  const Tensor x = cast(lstm.x), weight_input = cast(lstm.weight_input),
               weight_recurrent = cast(lstm.weight_recurrent);
  const OptionalTensor bias = cast(lstm.bias), projection = cast(lstm.projection),
                       m_0 = cast(lstm.m_0), c_0 = cast(lstm.c_0);
  return lstm_of<call_lstm>(x, weight_input, weight_recurrent, bias, projection, m_0, c_0,
                            lstm.lengths, lstm.reverse);
}

template <c10::DeviceType device>
void register_for(torch::Library& m) {
  implement<"noisy_topk_gating", &noisy_topk_gating<device>>(m);
  implement<"topk_routing", &topk_routing<device>>(m);
  implement<"load", &load<device>>(m);
  implement<"experts", &experts_of<experts<device>>>(m);
  implement<"linear_cross_entropy", &linear_cross_entropy_of<linear_cross_entropy<device>>>(m);
  implement<"lstm", &lstm_of<lstm<device>>>(m);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, AutocastCPU, m) { moe_ext::register_for<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(moe_ext, AutocastCUDA, m) { moe_ext::register_for<c10::DeviceType::CUDA>(m); }
