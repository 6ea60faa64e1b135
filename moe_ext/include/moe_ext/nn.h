// The layer as modules of LibTorch: gates, experts and MoE, with the parameter names of Python.
//
// Shapes: T tokens, D model width, E experts, K = k experts per token, R (token, expert)
// assignments.
//
//   using namespace moe_ext::nn;
//   MoE layer(MoEOptions(/*d_model=*/512, /*num_experts=*/32, /*k=*/4).hidden_sizes({1024}));
//   auto [y, aux] = layer(torch::randn({8, 20, 512}));
//   auto loss = y.square().mean() + aux.loss;
//
// With the same weights, input and noise, results are bitwise identical to those of Python.
// state_dict.h carries the weights over. These modules run on one rank: sharding over ranks is in
// Python (moe_ext.distributed).
//
// Constructors throw c10::ValueError if a size or option is out of range. They throw c10::TypeError
// if gate or experts has the wrong class. For a wrong shape or dtype, forward() throws
// c10::ValueError or c10::TypeError. Messages name class, argument, rule and value.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "export.h"
#include "ops.h"

namespace moe_ext::nn {

using ops::OptionalTensor;
using torch::Tensor;

// ---- Losses (Section 4, Appendix A)

using ops::cv_squared;

// Computes L_importance = weight * CV(Importance(X))^2 (Eq. 7) of importance [E], a scalar.
MOE_EXT_API Tensor importance_loss(const Tensor& importance, double weight);

// Computes L_load = weight * CV(Load(X))^2 (Appendix A) of load [E], a scalar.
MOE_EXT_API Tensor load_loss(const Tensor& load, double weight);

// Computes L_batchwise, the loss that trains the thresholds of a balanced gate (Appendix F), a
// scalar.
//
//   scores: [..., num_tokens, E].
//   threshold: [..., E].
//   mask: M_batchwise, bool, in the shape of scores.
MOE_EXT_API Tensor batchwise_loss(const Tensor& scores, const Tensor& threshold,
                                  const Tensor& mask);

// ---- Gates (Section 2.1)

// A gate's routing decision for T tokens. A slot is one of the R (token, expert) assignments.
// Slots are ordered by token.
struct MOE_EXT_API Routing {
  // [T, K], or [R] with token_offsets; float32 or float64. The weight of each slot.
  Tensor gates;
  // int64, in the shape of gates. The expert of each slot.
  Tensor expert_index;
  // [E], the sum of each expert's gates (Eq. 6).
  Tensor importance;
  // [E], the expected number of tokens per expert (Appendix A). Without noise, it is the number
  // of routed tokens, which has no gradient.
  Tensor load;
  // [T + 1] int64; token t has the slots token_offsets[t] <= s < token_offsets[t + 1]. Absent:
  // each token has K slots.
  OptionalTensor token_offsets = std::nullopt;
  // Whether every expert has exactly R / E tokens. MoE then needs no token counts.
  bool equal_load = false;
  // Scalar, the gate's own loss, which MoE adds to its loss.
  OptionalTensor loss = std::nullopt;
  // Scalars by name that describe the routing.
  std::map<std::string, Tensor> metrics = {};
  // Load_primary(X) [a], Load_i(X^(i)) [a, b] and |X^(i)| [a] of a hierarchical noisy gate; else
  // empty.
  std::vector<Tensor> load_factors = {};
  // [T, E], the router's logits x W_g, without noise, in at least float32. Losses such as ZLoss
  // need them. Absent: the gate does not compute a logit for every expert.
  OptionalTensor logits = std::nullopt;
  // [T, E], non-negative scores of the experts, if these are not softmax(logits).
  OptionalTensor scores = std::nullopt;

  // Computes p(x) [T, E]: softmax(logits), or with scores, scores / sum_j scores_j. A token whose
  // scores are all 0 has probabilities of 0. Throws c10::ValueError without logits and scores.
  Tensor probabilities() const;
};

// The base class of every gate: sizes, and forward(x). A gate of your own derives from a torch
// module and from Gate, and goes into MoEOptions::gate:
//
//   struct RoundRobinGateImpl : torch::nn::Cloneable<RoundRobinGateImpl>, Gate {
//     using Gate::Gate;
//     void reset() override {}
//     Routing forward(const Tensor& x) override {
//       auto token = torch::arange(x.size(0), x.options().dtype(torch::kLong)).unsqueeze(1);
//       auto index = (token + torch::arange(k(), token.options())) % num_experts();
//       return make_routing(torch::full_like(index, 1.0 / k(), torch::kFloat), index);
//     }
//   };
//   TORCH_MODULE(RoundRobinGate);
class MOE_EXT_API Gate {
 public:
  // d_model: D. num_experts: E. k: experts per token, 1 <= k <= E; the mean if the number varies.
  // name: the class that errors name.
  Gate(int64_t d_model, int64_t num_experts, int64_t k, const char* name = "Gate");
  virtual ~Gate() = default;

  // Routes the tokens x [T, D]; T may be 0.
  virtual Routing forward(const Tensor& x) = 0;

  // Routes the tokens x [T, D] to given experts, in the order of expert_index or another. The gates
  // are those of the current parameters. A gate that overrides it can replay a routing decision;
  // MoE::forward then takes expert_index. By default, it throws c10::ValueError.
  //
  //   expert_index: [T, K] int64, different experts for each token.
  virtual Routing replay(const Tensor& x, const Tensor& expert_index);

  int64_t d_model() const { return d_model_; }
  int64_t num_experts() const { return num_experts_; }
  int64_t k() const { return k_; }

 protected:
  // Makes a Routing from gates and expert_index, both [T, K]. load: [E]; absent: the number of
  // routed tokens. logits, scores: see Routing.
  Routing make_routing(const Tensor& gates, const Tensor& expert_index,
                       const OptionalTensor& load = std::nullopt,
                       const OptionalTensor& logits = std::nullopt,
                       const OptionalTensor& scores = std::nullopt) const;

 private:
  int64_t d_model_, num_experts_, k_;
};

// Routes every token to every expert with the gates G(x) = softmax(x W_g) (Eq. 2).
class MOE_EXT_API SoftmaxGateImpl : public torch::nn::Cloneable<SoftmaxGateImpl>, public Gate {
 public:
  SoftmaxGateImpl(int64_t d_model, int64_t num_experts);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Routing forward(const Tensor& x) override;

  Tensor w_gate;  // [D, E], initially zero
};
TORCH_MODULE(SoftmaxGate);

// The options of TopKGate. ops::topk_routing has the equations.
struct MOE_EXT_API TopKGateOptions {
  TopKGateOptions(int64_t d_model, int64_t num_experts, int64_t k);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // E, the number of experts.
  TORCH_ARG(int64_t, num_experts);
  // Experts per token, 1 <= k <= E.
  TORCH_ARG(int64_t, k);
  // "softmax", "sigmoid" or "sqrt_softplus".
  TORCH_ARG(std::string, score) = "softmax";
  // Whether the gates of a token sum to scale.
  TORCH_ARG(bool, renormalize) = true;
  // A factor of the gates.
  TORCH_ARG(double, scale) = 1.0;
  // Number of groups of experts, a divisor of E.
  TORCH_ARG(int64_t, num_groups) = 1;
  // Groups in which a token selects.
  TORCH_ARG(int64_t, groups_per_token) = 1;
  // Experts that count for the score of a group; no effect with a single group.
  TORCH_ARG(int64_t, group_score_k) = 2;
  // Whether the logits are x W_g + b_g.
  TORCH_ARG(bool, logit_bias) = false;
  // u, the step of the selection bias; absent: no selection bias. With 0, it does not change.
  TORCH_ARG(std::optional<double>, bias_update_rate) = std::nullopt;
};

// Routes each token to its top k experts without noise. By default, the gates are the softmax
// scores, masked and renormalized (Appendix F with M = TopK). The options are those of later
// models. Load is the number of routed tokens, without gradient.
//
// With bias_update_rate, a selection bias b balances the experts without a loss (arXiv 2408.15664).
// The gate selects by the scores plus b; b does not enter the gates. In training mode, the gate
// counts the tokens of each expert. Call update_gates once in each optimizer step.
class MOE_EXT_API TopKGateImpl : public torch::nn::Cloneable<TopKGateImpl>, public Gate {
 public:
  TopKGateImpl(int64_t d_model, int64_t num_experts, int64_t k);
  explicit TopKGateImpl(const TopKGateOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // Move the counts too, and keep the selection bias in at least float32. In half precision, its
  // steps would round to zero.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  // Routes the tokens x [T, D], in order of decreasing biased score.
  Routing forward(const Tensor& x) override;
  // See Gate; the gates are in the order of expert_index.
  Routing replay(const Tensor& x, const Tensor& expert_index) override;

  // Adds u sign(mean(counts) - counts) to the selection bias and sets the counts to zero; see
  // update_gates.
  void update();

  TopKGateOptions options;
  Tensor w_gate;          // [D, E], initially normal with standard deviation 0.1 D^-1/2
  Tensor b_gate;          // [E], initially zero; undefined without logit_bias
  Tensor selection_bias;  // [E], a buffer, initially zero; undefined without bias_update_rate
  // [E] int64, the tokens of each expert since the last update; undefined without bias_update_rate.
  // It is not in the state dict.
  Tensor tokens_since_update;

 private:
  Routing route(const Tensor& x, const OptionalTensor& expert_index);
  template <typename... Target>
  void move(Target... target);
};
TORCH_MODULE(TopKGate);

// Updates the selection bias of every TopKGate with bias_update_rate from its count of tokens, over
// all micro-batches in training mode since the last update:
//
//   b_i <- b_i + bias_update_rate * sign(mean(count) - count_i)
//
// The counts then start again from zero. Call it once in each optimizer step. A forward pass that a
// backward pass repeats does not count.
//
//   module: a module with such gates.
MOE_EXT_API void update_gates(torch::nn::Module& module);

// The options of NoisyTopKGate.
struct MOE_EXT_API NoisyTopKGateOptions {
  NoisyTopKGateOptions(int64_t d_model, int64_t num_experts, int64_t k);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // E, the number of experts.
  TORCH_ARG(int64_t, num_experts);
  // Experts per token, 1 <= k <= E.
  TORCH_ARG(int64_t, k);
  // Minimum standard deviation of the noise.
  TORCH_ARG(double, noise_epsilon) = 1e-2;
  // Whether to block the gradient of the load through the thresholds.
  TORCH_ARG(bool, detach_threshold) = false;
  // Source of the noise, which clones share; absent: torch's global generator.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
};

// Selects the top k of noisy logits (Eqs. 3-5) and estimates a smooth load (Appendix A). Adds
// noise only in training mode. In evaluation mode, all logits of an untrained gate tie; then the
// experts with the lowest indices are selected.
class MOE_EXT_API NoisyTopKGateImpl : public torch::nn::Cloneable<NoisyTopKGateImpl>, public Gate {
 public:
  explicit NoisyTopKGateImpl(const NoisyTopKGateOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Routing forward(const Tensor& x) override;
  // See Gate. The gates are in order of decreasing logit. In training mode, the load is still the
  // load of the experts that the gate itself selects.
  Routing replay(const Tensor& x, const Tensor& expert_index) override;

  // Draws standard normal noise in the shape and dtype of `like`. Override it to replay noise; a
  // class that does must also override clone().
  virtual Tensor draw_noise(const Tensor& like);

  NoisyTopKGateOptions options;
  Tensor w_gate;   // [D, E], initially zero
  Tensor w_noise;  // [D, E], initially zero

 private:
  Routing route(const Tensor& x, const OptionalTensor& expert_index);
};
TORCH_MODULE(NoisyTopKGate);

// The sizes of a hierarchical gate or mixture: a groups of b experts. A token goes to k1 groups
// and to k2 experts in each of them. Expert i * b + j is expert j of group i.
struct MOE_EXT_API HierarchicalNoisyTopKGateOptions {
  // k: (k1, k2).
  HierarchicalNoisyTopKGateOptions(int64_t d_model, int64_t num_groups, int64_t experts_per_group,
                                   std::array<int64_t, 2> k);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // a, the number of groups.
  TORCH_ARG(int64_t, num_groups);
  // b, the number of experts in each group.
  TORCH_ARG(int64_t, experts_per_group);
  // (k1, k2), groups per token and experts per chosen group.
  using Levels = std::array<int64_t, 2>;
  TORCH_ARG(Levels, k);
  // Minimum standard deviation of the noise.
  TORCH_ARG(double, noise_epsilon) = 1e-2;
  // Whether to block the gradient of the load through the thresholds.
  TORCH_ARG(bool, detach_threshold) = false;
  // Source of the noise, which clones share; absent: torch's global generator.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
};

// Selects k1 of a groups, then k2 of the b experts in each, with noise (Appendix B). The gate of
// expert i * b + j is G_primary(x)_i * G_i(x)_j. A level with a single choice draws no noise.
class MOE_EXT_API HierarchicalNoisyTopKGateImpl
    : public torch::nn::Cloneable<HierarchicalNoisyTopKGateImpl>,
      public Gate {
 public:
  explicit HierarchicalNoisyTopKGateImpl(const HierarchicalNoisyTopKGateOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Routing forward(const Tensor& x) override;

  // Draws standard normal noise in the shape and dtype of `like`; zeros for a single choice.
  // Override it to replay noise; a class that does must also override clone().
  virtual Tensor draw_noise(const Tensor& like);

  HierarchicalNoisyTopKGateOptions options;
  Tensor w_gate;             // [D, a], initially zero, as are the others
  Tensor w_noise;            // [D, a]
  Tensor w_gate_secondary;   // [a, D, b]
  Tensor w_noise_secondary;  // [a, D, b]
};
TORCH_MODULE(HierarchicalNoisyTopKGate);

// The options of BalancedGate.
struct MOE_EXT_API BalancedGateOptions {
  BalancedGateOptions(int64_t d_model, int64_t num_experts, int64_t k);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // E, the number of experts.
  TORCH_ARG(int64_t, num_experts);
  // Mean number of experts per token, 1 <= k <= E.
  TORCH_ARG(int64_t, k);
  // Whether L_batchwise trains only the thresholds, not W_g and earlier layers.
  TORCH_ARG(bool, detach_scores) = true;
};

// Strictly balanced gating (Appendix F). In training mode, each expert selects the m = k T / E
// tokens with its largest scores. In evaluation mode, it selects the tokens with scores above its
// threshold, which the loss L_batchwise / T trains. The first training batch sets the thresholds.
// Metrics: share_without_expert and, with the batchwise mask, mask_disagreement.
class MOE_EXT_API BalancedGateImpl : public torch::nn::Cloneable<BalancedGateImpl>, public Gate {
 public:
  explicit BalancedGateImpl(const BalancedGateOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  // Move the parameters and buffers, but keep the flag `initialized` bool.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  Routing forward(const Tensor& x) override;

  BalancedGateOptions options;
  bool batchwise = false;  // whether to select by the batchwise mask in evaluation mode too
  Tensor w_gate;           // [D, E], initially zero
  Tensor threshold;        // [E], initially zero
  Tensor initialized;      // bool scalar, a buffer: whether the thresholds have been set
};
TORCH_MODULE(BalancedGate);

// The options of HierarchicalBalancedGate; see HierarchicalNoisyTopKGateOptions.
struct MOE_EXT_API HierarchicalBalancedGateOptions {
  // k: (k1, k2).
  HierarchicalBalancedGateOptions(int64_t d_model, int64_t num_groups, int64_t experts_per_group,
                                  std::array<int64_t, 2> k);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // a, the number of groups.
  TORCH_ARG(int64_t, num_groups);
  // b, the number of experts in each group.
  TORCH_ARG(int64_t, experts_per_group);
  // (k1, k2), the mean number of groups per token and of experts per chosen group.
  using Levels = std::array<int64_t, 2>;
  TORCH_ARG(Levels, k);
  // Whether L_batchwise trains only the thresholds, not the weights and earlier layers.
  TORCH_ARG(bool, detach_scores) = true;
};

// Strictly balanced gating on two levels (Appendices B and F); see BalancedGate.
class MOE_EXT_API HierarchicalBalancedGateImpl
    : public torch::nn::Cloneable<HierarchicalBalancedGateImpl>,
      public Gate {
 public:
  explicit HierarchicalBalancedGateImpl(const HierarchicalBalancedGateOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  // Move the parameters and buffers, but keep the flags bool.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  Routing forward(const Tensor& x) override;

  HierarchicalBalancedGateOptions options;
  bool batchwise = false;        // whether to select by the batchwise mask in evaluation mode too
  Tensor w_gate;                 // [D, a]
  Tensor threshold;              // [a]
  Tensor initialized;            // bool scalar, a buffer
  Tensor w_gate_secondary;       // [a, D, b]
  Tensor threshold_secondary;    // [a, b]
  Tensor initialized_secondary;  // bool scalar, a buffer
};
TORCH_MODULE(HierarchicalBalancedGate);

// Lets each expert select the m = k T / E tokens of the batch with its largest scores S = softmax(x
// W_g) (arXiv 2202.09368, Eq. 1 with capacity factor k). The gates are these scores, not
// renormalized. A token has k experts on average. The output of a token without experts is 0.
// Metric: share_without_expert.
//
// The gate is not causal, also in evaluation mode: the experts of a token depend on all other
// tokens of the batch.
class MOE_EXT_API ExpertChoiceGateImpl : public torch::nn::Cloneable<ExpertChoiceGateImpl>,
                                         public Gate {
 public:
  // k: mean number of experts per token, 1 <= k <= num_experts.
  ExpertChoiceGateImpl(int64_t d_model, int64_t num_experts, int64_t k);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Routing forward(const Tensor& x) override;

  Tensor w_gate;  // [D, E], initially zero
};
TORCH_MODULE(ExpertChoiceGate);

// ---- Losses of routers

// The base class of the losses of routing decisions, for MoEOptions::losses. A loss is a function
// of sums over tokens or sequences. A loss of your own defines name, sums and value:
//
//   struct EntropyLoss : RouterLoss {
//     using RouterLoss::RouterLoss;
//     std::string name() const override { return "router_entropy"; }
//     std::vector<Tensor> sums(const Routing& r, const Tensor&, const Tensor&) const override {
//       auto p = r.probabilities();
//       return {-torch::special::xlogy(p, p).sum(), torch::full({}, p.size(0), p.options())};
//     }
//     Tensor value(at::TensorList sums) const override { return sums[0] / sums[1].clamp_min(1); }
//   };
class MOE_EXT_API RouterLoss {
 public:
  // weight: the scale of the loss in MoEAux::loss, at least 0. owner: the class that errors name.
  explicit RouterLoss(double weight, const char* owner = "RouterLoss");
  virtual ~RouterLoss() = default;

  // The key of the unweighted loss in MoEAux::losses. It differs between the losses of a layer.
  virtual std::string name() const = 0;

  // Computes the sums over the T tokens that the loss depends on, in the dtype of routing.logits.
  //
  //   tokens_per_expert: [E] int64.
  //   sequence_offsets: [S + 1] int64; sequence s has the tokens sequence_offsets[s] <= t <
  //     sequence_offsets[s + 1].
  virtual std::vector<Tensor> sums(const Routing& routing, const Tensor& tokens_per_expert,
                                   const Tensor& sequence_offsets) const = 0;

  // Computes the unweighted loss, a scalar, from these sums.
  virtual Tensor value(at::TensorList sums) const = 0;

  // Returns the weight. Throws c10::ValueError if it is below 0 or not a number of float32.
  double checked_weight() const;

  double weight;  // may change between steps

 private:
  std::string owner_;
};

// Computes E sum_i f_i P_i (arXiv 2101.03961, Eqs. 4-6). f_i is the share of expert i in the
// (token, expert) assignments, P_i the mean of Routing::probabilities over the tokens. The loss of
// uniform routing is 1. Only P has a gradient.
//
// With per_sequence, f and P cover a single sequence, and the loss is the mean over the sequences
// with at least one token (arXiv 2412.19437, Eqs. 17-20). A sequence is the dimension before the
// last of x [..., T, D], without masked-out tokens.
class MOE_EXT_API SwitchLoss : public RouterLoss {
 public:
  explicit SwitchLoss(double weight, bool per_sequence = false);

  // "switch_loss"; with per_sequence "switch_loss_per_sequence".
  std::string name() const override;
  std::vector<Tensor> sums(const Routing& routing, const Tensor& tokens_per_expert,
                           const Tensor& sequence_offsets) const override;
  Tensor value(at::TensorList sums) const override;

  const bool per_sequence;
};

// Computes 1/T sum_t (log sum_i exp(logits_ti))^2 (arXiv 2202.08906, Eq. 5). The loss keeps logits
// small, so that their softmax rounds less. For a noisy gate, the logits are without noise.
class MOE_EXT_API ZLoss : public RouterLoss {
 public:
  explicit ZLoss(double weight);

  // "z_loss".
  std::string name() const override;
  std::vector<Tensor> sums(const Routing& routing, const Tensor& tokens_per_expert,
                           const Tensor& sequence_offsets) const override;
  Tensor value(at::TensorList sums) const override;
};

// ---- Experts (Section 3.2)

// The base class of all experts. Experts of your own derive from a torch module and from Experts,
// and go into MoEOptions::experts.
class MOE_EXT_API Experts {
 public:
  // num_experts: E. d_model: the width of an input row. d_output: the width of an output row.
  Experts(int64_t num_experts, int64_t d_model, int64_t d_output);
  virtual ~Experts() = default;

  // Maps rows x [R, D], sorted by expert, to [R, d_output].
  //
  //   offsets: [E + 1] int64; expert e has the rows offsets[e] <= r < offsets[e + 1].
  virtual Tensor forward(const Tensor& x, const Tensor& offsets) = 0;

  int64_t num_experts() const { return num_experts_; }
  int64_t d_model() const { return d_model_; }
  int64_t d_output() const { return d_output_; }

 private:
  int64_t num_experts_, d_model_, d_output_;
};

// The options of FeedForwardExperts.
struct MOE_EXT_API FeedForwardExpertsOptions {
  FeedForwardExpertsOptions(int64_t num_experts, int64_t d_model);

  // E, the number of experts; may be 0.
  TORCH_ARG(int64_t, num_experts);
  // D, the width of an input row.
  TORCH_ARG(int64_t, d_model);
  // Widths of the hidden layers; none: each expert is a single matrix.
  TORCH_ARG(std::vector<int64_t>, hidden_sizes) = {};
  // See ops::experts. A gated activation doubles the width of the matrix before it.
  TORCH_ARG(std::string, activation) = "relu";
  // See ops::experts. Only for an activation with numbers.
  TORCH_ARG(std::vector<double>, activation_args) = {};
  // Whether the layers have biases. The paper's experts have none.
  TORCH_ARG(bool, bias) = false;
  // The width of an output row; absent: d_model.
  TORCH_ARG(std::optional<int64_t>, d_output) = std::nullopt;
  // The dtype of weights, biases and input rows; absent: torch's default dtype.
  TORCH_ARG(std::optional<torch::Dtype>, dtype) = std::nullopt;
};

// E feed-forward networks of equal shape; each layer has one stacked weight tensor. Parameters:
// weight_0 [E, D, width], weight_1, ... [E, fan_in, width] and, with biases, bias_0, ... [E,
// width]. Initial weights are uniform with variance 1 / fan_in, biases are zero, and both are the
// ones that Python draws with the same seed. One expert is a dense feed-forward network.
class MOE_EXT_API FeedForwardExpertsImpl final
    : public torch::nn::Cloneable<FeedForwardExpertsImpl>,
      public Experts {
 public:
  explicit FeedForwardExpertsImpl(const FeedForwardExpertsOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  Tensor forward(const Tensor& x, const Tensor& offsets) override;

  // Maps rows or tokens: all three forms of ops::experts.
  Tensor forward_fused(const Tensor& x, const ops::ExpertsOptions& options) const;

  FeedForwardExpertsOptions options;
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;  // empty without biases
};
TORCH_MODULE(FeedForwardExperts);

// The options of SharedExpert.
struct MOE_EXT_API SharedExpertOptions {
  SharedExpertOptions(int64_t d_model, std::vector<int64_t> hidden_sizes);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // Widths of the hidden layers.
  TORCH_ARG(std::vector<int64_t>, hidden_sizes);
  // See FeedForwardExpertsOptions.
  TORCH_ARG(std::string, activation) = "relu";
  TORCH_ARG(std::vector<double>, activation_args) = {};
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(std::optional<int64_t>, d_output) = std::nullopt;
  TORCH_ARG(std::optional<torch::Dtype>, dtype) = std::nullopt;
  // Whether a sigmoid of each token scales the output, as in Qwen2-MoE (arXiv 2407.10671).
  TORCH_ARG(bool, gated) = false;
  // Whether to recompute the hidden layers in the backward pass; see MoEOptions.
  TORCH_ARG(bool, recompute) = false;
};

// Computes a feed-forward network of every token, for MoEOptions::shared_expert (arXiv 2401.06066,
// Eq. 9). With gated, the output is sigmoid(x w_gate) E(x).
class MOE_EXT_API SharedExpertImpl : public torch::nn::Cloneable<SharedExpertImpl> {
 public:
  explicit SharedExpertImpl(const SharedExpertOptions& options);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  // Maps the tokens x [T, D] to [T, d_output].
  Tensor forward(const Tensor& x);

  SharedExpertOptions options;
  FeedForwardExperts expert = nullptr;  // a single expert
  Tensor w_gate;                        // [D, 1], initially zero; undefined without gated
};
TORCH_MODULE(SharedExpert);

// ---- The layer (Section 2)

// The losses, statistics and routing decision that MoE returns with y. T counts the tokens that
// are not masked out.
struct MOE_EXT_API MoEAux {
  // Scalar, w_importance * CV(importance)^2 + w_load * CV(load)^2 + the weighted losses + the
  // gate's own loss. Add this loss, summed over all MoE layers, to the task loss (mean per token,
  // in nats).
  Tensor loss;
  Tensor importance;                            // [E], see Routing
  Tensor load;                                  // [E], see Routing
  Tensor gates;                                 // [T, K], or [R] with token_offsets
  Tensor expert_index;                          // int64, in the shape of gates
  Tensor tokens_per_expert;                     // [E] int64, the exact number of tokens per expert
  OptionalTensor token_offsets = std::nullopt;  // see Routing
  std::map<std::string, Tensor> gate_metrics = {};  // scalars that the gate reports
  std::vector<Tensor> load_factors = {};            // see Routing
  std::map<std::string, Tensor> losses = {};        // the unweighted value of each RouterLoss

  // Returns the balance metrics of the paper's Table 6: cv_importance, cv_load,
  // max_over_mean_load, cv_tokens, the gate's metrics and losses. Synchronizes with the GPU.
  std::map<std::string, double> metrics() const;
};

// The options of MoE.
struct MOE_EXT_API MoEOptions {
  MoEOptions(int64_t d_model, int64_t num_experts, int64_t k);

  // D, the width of x.
  TORCH_ARG(int64_t, d_model);
  // E, the number of experts.
  TORCH_ARG(int64_t, num_experts);
  // Experts per token.
  TORCH_ARG(int64_t, k);
  // Widths of the hidden layers of each expert; absent: {4 * d_model}.
  TORCH_ARG(std::optional<std::vector<int64_t>>, hidden_sizes) = std::nullopt;
  // See FeedForwardExpertsOptions.
  TORCH_ARG(std::string, activation) = "relu";
  // See FeedForwardExpertsOptions.
  TORCH_ARG(std::vector<double>, activation_args) = {};
  // Whether the experts have biases.
  TORCH_ARG(bool, bias) = false;
  // Whether to recompute the experts in the backward pass instead of saving their activations.
  // Results are bitwise identical. Only for FeedForwardExperts.
  TORCH_ARG(bool, recompute) = false;
  // The dtype of the expert weights. Tokens are cast to it for the experts but not for the gate;
  // y has the dtype of x. Absent: torch's default dtype, without a cast.
  TORCH_ARG(std::optional<torch::Dtype>, expert_dtype) = std::nullopt;
  // Weight of the importance loss; absent: 0.1, or 0 with losses.
  TORCH_ARG(std::optional<double>, w_importance) = std::nullopt;
  // Weight of the load loss; absent: 0.1, or 0 with losses.
  TORCH_ARG(std::optional<double>, w_load) = std::nullopt;
  // Losses in place of the paper's, or in addition to them. Clones share them.
  TORCH_ARG(std::vector<std::shared_ptr<RouterLoss>>, losses) = {};
  // Minimum standard deviation of the noise of the default gate; absent: the default of that gate.
  TORCH_ARG(std::optional<double>, noise_epsilon) = std::nullopt;
  // Source of the noise of the default gate; absent: torch's global generator.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
  // A module that is a Gate, as a pointer or as a holder such as TopKGate(...); null: a
  // NoisyTopKGate with noise_epsilon and generator. A given gate excludes these two.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, gate) = nullptr;
  // A module that is an Experts, as a pointer or as a holder; null: FeedForwardExperts with
  // hidden_sizes, activation, activation_args, bias and expert_dtype. Given experts exclude these.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, experts) = nullptr;
  // A module from [T, D] to [T, d_output] that processes every token, such as SharedExpert(...), as
  // a holder or as an AnyModule. Its output is added to y. Empty: no shared expert.
  TORCH_ARG(torch::nn::AnyModule, shared_expert) = {};

 public:
  // For hidden_sizes({1024}), which does not convert to std::optional.
  MoEOptions& hidden_sizes(std::initializer_list<int64_t> sizes) {
    return hidden_sizes(std::vector<int64_t>(sizes));
  }
  template <typename M>
  MoEOptions& gate(const torch::nn::ModuleHolder<M>& holder) {
    return gate(holder.ptr());
  }
  template <typename M>
  MoEOptions& experts(const torch::nn::ModuleHolder<M>& holder) {
    return experts(holder.ptr());
  }
  template <typename M>
  MoEOptions& shared_expert(const torch::nn::ModuleHolder<M>& holder) {
    return shared_expert(torch::nn::AnyModule(holder));
  }
};

// Computes y = sum_i G(x)_i E_i(x) (Eq. 1) with only the k chosen experts of each token.
//
// Children: gate, experts and, if given, shared_expert. Their parameters are named as in Python:
// "gate.w_gate", "experts.weight_0", ...
class MOE_EXT_API MoEImpl : public torch::nn::Cloneable<MoEImpl> {
 public:
  explicit MoEImpl(const MoEOptions& options);
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // Maps x [..., D] to y [..., d_output], in the dtype of x.
  //
  //   mask: [...] bool, true at real tokens. Masked-out tokens never reach the gate, the experts or
  //     the losses; their outputs are 0.
  //   expert_index: [..., K] int64 or int32, the experts of each token, such as
  //     MoEAux::expert_index of an earlier pass, which has only real tokens. Gates, losses and
  //     gradients are those of the gate's current parameters. With equal inputs, parameters and
  //     noise, outputs are bitwise identical to those of the earlier pass. TopKGate and
  //     NoisyTopKGate support it; see Gate::replay. Absent: the gate selects the experts.
  std::tuple<Tensor, MoEAux> forward(const Tensor& x, const OptionalTensor& mask = std::nullopt,
                                     const OptionalTensor& expert_index = std::nullopt);

  // The children.
  Gate& gate() const { return *gate_; }
  Experts& experts() const { return *experts_; }

  MoEOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(OptionalTensor())},
                           {2, torch::nn::AnyValue(OptionalTensor())})

  // Replaces the children, which a copy of a module shares with it, by clones.
  void clone_children(const std::optional<torch::Device>& device);

 private:
  // Checks the given experts of tokens [T, D] and returns them as int64 [T, K].
  Tensor checked_index(const Tensor& expert_index, const Tensor& tokens) const;

  // Converts the tokens x to the dtype of the experts if expert_dtype is set.
  Tensor cast(const Tensor& x) const;

  // Returns sum_i G(x)_i E_i(x) of routed tokens x.
  Tensor mixture(const Tensor& x, const Routing& routing, const ops::DispatchPlan& plan) const;

  std::shared_ptr<Gate> gate_;
  std::shared_ptr<Experts> experts_;
};
TORCH_MODULE(MoE);

// Declares the setter and the getters of an option of layer_, as TORCH_ARG does for a member.
#define MOE_EXT_LAYER_ARG(name)                                                      \
  template <typename T = std::decay_t<decltype(std::declval<MoEOptions&>().name())>> \
  HierarchicalMoEOptions& name(T&& value) {                                          \
    layer_.name(std::forward<T>(value));                                             \
    return *this;                                                                    \
  }                                                                                  \
  const auto& name() const noexcept { return layer_.name(); }                        \
  auto& name() noexcept { return layer_.name(); }

// The options of HierarchicalMoE: the sizes, and the options of MoE.
struct MOE_EXT_API HierarchicalMoEOptions {
  // k: (k1, k2).
  HierarchicalMoEOptions(int64_t d_model, int64_t num_groups, int64_t experts_per_group,
                         std::array<int64_t, 2> k);

  // See HierarchicalNoisyTopKGateOptions.
  TORCH_ARG(int64_t, d_model);
  TORCH_ARG(int64_t, num_groups);
  TORCH_ARG(int64_t, experts_per_group);
  using Levels = std::array<int64_t, 2>;
  TORCH_ARG(Levels, k);

 public:
  // See MoEOptions. gate: null means a HierarchicalNoisyTopKGate with noise_epsilon and
  // generator.
  MOE_EXT_LAYER_ARG(hidden_sizes)
  MOE_EXT_LAYER_ARG(activation)
  MOE_EXT_LAYER_ARG(activation_args)
  MOE_EXT_LAYER_ARG(bias)
  MOE_EXT_LAYER_ARG(recompute)
  MOE_EXT_LAYER_ARG(expert_dtype)
  MOE_EXT_LAYER_ARG(w_importance)
  MOE_EXT_LAYER_ARG(w_load)
  MOE_EXT_LAYER_ARG(losses)
  MOE_EXT_LAYER_ARG(noise_epsilon)
  MOE_EXT_LAYER_ARG(generator)
  MOE_EXT_LAYER_ARG(gate)
  MOE_EXT_LAYER_ARG(experts)
  MOE_EXT_LAYER_ARG(shared_expert)

  // For hidden_sizes({1024}), whose type the setter cannot know.
  HierarchicalMoEOptions& hidden_sizes(std::initializer_list<int64_t> sizes) {
    layer_.hidden_sizes(sizes);
    return *this;
  }

 private:
  friend class HierarchicalMoEImpl;

  // Returns the options of the MoE that the layer is, with num_experts and k of both levels.
  MoEOptions flat() const;

  MoEOptions layer_;  // without sizes
};
#undef MOE_EXT_LAYER_ARG

// MoE with a two-level gate over a groups of b experts (Appendix B, Eq. 12). The layer has
// num_experts = a * b and k = k1 * k2; expert j of group i has the index i * b + j.
class MOE_EXT_API HierarchicalMoEImpl : public MoEImpl {
 public:
  explicit HierarchicalMoEImpl(const HierarchicalMoEOptions& options);
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(HierarchicalMoE);

}  // namespace moe_ext::nn
