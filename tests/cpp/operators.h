// The operators by name, called with the arguments that export.py wrote.
#pragma once

#include <moe_ext/ops.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "exported.h"

namespace exported {

namespace ops = moe_ext::ops;

using Operator = std::function<std::vector<Tensor>(const Tree&)>;

inline std::vector<double> activation_args(const Tree& a) {
  std::vector<double> numbers;
  for (const auto& number : a.list("activation_args")) numbers.push_back(number.item<double>());
  return numbers;
}

// One for each weight; empty if no layer has an adapter.
inline std::vector<ops::LoRA> adapters(const Tree& a) {
  const auto given = (a / "lora").branches();
  if (given.empty()) return {};
  std::vector<ops::LoRA> all((a / "weights").branches().size());
  for (const auto& [number, adapter] : given) {
    all[std::stoi(number)] = {.a = adapter["0"],
                              .b = adapter["1"],
                              .scale = adapter.number("2", 1.0),
                              .mask = adapter.find("3").value_or(Tensor())};
  }
  return all;
}

inline ops::ExpertsOptions experts_options(const Tree& a) {
  return {.offsets = a.find("offsets"),
          .inverse = a.find("inverse"),
          .gates = a.find("gates"),
          .token_offsets = a.find("token_offsets"),
          .recompute = a.number<bool>("recompute")};
}

// Returns the results; factored_step_ those that it updates.
inline const std::map<std::string, Operator> operators = {
    {"noisy_topk_gating",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto kept =
           ops::noisy_topk_gating(a["clean_logits"], a.find("raw_noise_stddev"), a.find("noise"),
                                  a.number<int64_t>("k"), a.number("noise_epsilon", 1e-2));
       return {kept.gates, kept.expert_index, kept.threshold, kept.threshold_index,
               kept.noise_stddev};
     }},
    {"topk_routing",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto routing = ops::topk_routing(
           a["logits"], a.number<int64_t>("k"), a.find("bias"),
           a.find("score") ? a.text("score") : "softmax", a.number<bool>("renormalize", true),
           a.number("scale", 1.0), a.number<int64_t>("num_groups", 1),
           a.number<int64_t>("groups_per_token", 1), a.number<int64_t>("group_score_k", 2),
           a.find("expert_index"));
       return {routing.gates, routing.expert_index};
     }},
    {"load",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto threshold = a["threshold"];
       return {ops::load(a["clean_logits"], a["noise_stddev"],
                         a.number<bool>("detach_threshold") ? threshold.detach() : threshold,
                         a["expert_index"], a.find("group_offsets"))};
     }},
    {"importance",
     [](const Tree& a) -> std::vector<Tensor> {
       return {ops::importance(a["gates"], a["expert_index"], a.number<int64_t>("num_experts"))};
     }},
    {"importance_and_load",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto sums = ops::importance_and_load(a["gates"], a["expert_index"],
                                                  a.number<int64_t>("num_experts"));
       return {sums.importance, sums.load};
     }},
    {"weighted_cv_squared",
     [](const Tree& a) -> std::vector<Tensor> {
       std::vector<double> weights;
       for (const auto& number : a.list("weights")) weights.push_back(number.item<double>());
       return {ops::weighted_cv_squared(a.list("values"), weights)};
     }},
    {"batchwise_topm",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto count = a.find("num_experts");
       const auto best = ops::batchwise_topm(
           a["scores"], a.number<int64_t>("m"), a.number<int64_t>("first_expert", 0),
           count ? std::optional(count->item<int64_t>()) : std::nullopt);
       return {best.row_index, best.mth_score};
     }},
    {"selected_softmax",
     [](const Tree& a) -> std::vector<Tensor> {
       return {ops::selected_softmax(a["logits"], a["expert_index"], a["token_offsets"])};
     }},
    {"dispatch_plan",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto plan = ops::dispatch_plan(a["expert_index"], a.number<int64_t>("num_experts"));
       return {plan.permutation, plan.inverse, plan.tokens_per_expert, plan.offsets};
     }},
    {"dispatch",
     [](const Tree& a) -> std::vector<Tensor> {
       return {ops::dispatch(a["x"], a["inverse"], a.find("token_offsets"))};
     }},
    {"combine",
     [](const Tree& a) -> std::vector<Tensor> {
       return {ops::combine(a["expert_output"], a["gates"], a["inverse"], a.find("token_offsets"))};
     }},
    {"experts",
     [](const Tree& a) -> std::vector<Tensor> {
       return {ops::experts(a["x"], a.list("weights"), a.list("biases"), a.text("activation"),
                            experts_options(a), activation_args(a), adapters(a))};
     }},
    {"packed_experts",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto layers = (a / "weights").branches();
       std::vector<std::string> formats;
       for (const auto& [number, layer] : layers) formats.push_back(layer.text("1"));
       std::vector<ops::PackedWeight> weights;
       for (const auto& [number, layer] : layers) {
         weights.push_back({.panels = layer["0"],
                            .format = formats[weights.size()],
                            .group = layer.number<int64_t>("4"),
                            .outputs = layer.number<int64_t>("3")});
       }
       return {ops::packed_experts(a["x"], weights, a.list("biases"), a.text("activation"),
                                   experts_options(a), activation_args(a), "exact", adapters(a))};
     }},
    {"linear_cross_entropy",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto softcap = a.find("softcap");
       return {ops::linear_cross_entropy(
           a["input"], a["linear_weight"], a["target"],
           {.linear_bias = a.find("linear_bias"),
            .reduction = a.find("reduction") ? a.text("reduction") : "mean",
            .ignore_index = a.number<int64_t>("ignore_index", -100),
            .label_smoothing = a.number("label_smoothing", 0.0),
            .z_loss = a.number("z_loss", 0.0),
            .softcap = softcap ? std::optional(softcap->item<double>()) : std::nullopt,
            .recompute = a.number<bool>("recompute", false)})};
     }},
    {"lstm",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto out = ops::lstm(a["x"], a["weight_input"], a["weight_recurrent"], a.find("bias"),
                                  a.find("projection"), a.find("m_0"), a.find("c_0"),
                                  a.find("lengths"), a.number<bool>("reverse"));
       return {out.m, out.m_n, out.c_n};
     }},
    {"lstm_cell",
     [](const Tree& a) -> std::vector<Tensor> {
       const auto state = ops::lstm_cell(a["gates"], a["c_0"]);
       return {state.h, state.c};
     }},
    {"factored_step_",
     [](const Tree& a) -> std::vector<Tensor> {
       auto param = a["param"].clone(), row = a["row"].clone(), column = a["column"].clone();
       ops::factored_step_(param, a["grad"], row, column, a["lr"], a["correction"],
                           a.number<double>("decay"), a.number<double>("gain"),
                           a.number<double>("eps"), a.number<bool>("mean_of_roots"));
       return {param, row, column};
     }},
};

}  // namespace exported
