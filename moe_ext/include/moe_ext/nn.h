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
#include <utility>
#include <vector>

#include "export.h"
#include "ops.h"

namespace moe_ext::nn {

using ops::OptionalTensor;
using torch::Tensor;

// ---- Losses (Section 4, Appendix A)

// Computes the squared coefficient of variation of values [E], population variance / mean^2: a
// scalar; 0 if all values are 0.
MOE_EXT_API Tensor cv_squared(const Tensor& values);

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
struct Routing {
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

  int64_t d_model() const { return d_model_; }
  int64_t num_experts() const { return num_experts_; }
  int64_t k() const { return k_; }

 protected:
  // Makes a Routing from gates and expert_index, both [T, K]. load: [E]; absent: the number of
  // routed tokens.
  Routing make_routing(const Tensor& gates, const Tensor& expert_index,
                       const OptionalTensor& load = std::nullopt) const;

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

// Routes each token to its top k experts without noise (Appendix F with M = TopK). The gates are
// the softmax scores, masked and renormalized. Load is the number of routed tokens, without
// gradient.
class MOE_EXT_API TopKGateImpl : public torch::nn::Cloneable<TopKGateImpl>, public Gate {
 public:
  TopKGateImpl(int64_t d_model, int64_t num_experts, int64_t k);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Routing forward(const Tensor& x) override;

  Tensor w_gate;  // [D, E], initially normal with standard deviation 0.1 D^-1/2
};
TORCH_MODULE(TopKGate);

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

  // Draws standard normal noise in the shape and dtype of `like`. Override it to replay noise; a
  // class that does must also override clone().
  virtual Tensor draw_noise(const Tensor& like);

  NoisyTopKGateOptions options;
  Tensor w_gate;   // [D, E], initially zero
  Tensor w_noise;  // [D, E], initially zero
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

// ---- The layer (Section 2)

// The losses, statistics and routing decision that MoE returns with y. T counts the tokens that
// are not masked out.
struct MOE_EXT_API MoEAux {
  // Scalar, w_importance * CV(importance)^2 + w_load * CV(load)^2 + the gate's own loss. Add this
  // loss, summed over all MoE layers, to the task loss (mean per token, in nats).
  Tensor loss;
  Tensor importance;                            // [E], see Routing
  Tensor load;                                  // [E], see Routing
  Tensor gates;                                 // [T, K], or [R] with token_offsets
  Tensor expert_index;                          // int64, in the shape of gates
  Tensor tokens_per_expert;                     // [E] int64, the exact number of tokens per expert
  OptionalTensor token_offsets = std::nullopt;  // see Routing
  std::map<std::string, Tensor> gate_metrics = {};  // scalars that the gate reports
  std::vector<Tensor> load_factors = {};            // see Routing

  // Returns the balance metrics of the paper's Table 6: cv_importance, cv_load,
  // max_over_mean_load, cv_tokens and the gate's metrics. Synchronizes with the GPU.
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
  // Whether the experts have biases.
  TORCH_ARG(bool, bias) = false;
  // Whether to recompute the experts in the backward pass instead of saving their activations.
  // Results are bitwise identical. Only for FeedForwardExperts.
  TORCH_ARG(bool, recompute) = false;
  // The dtype of the expert weights. Tokens are cast to it for the experts but not for the gate;
  // y has the dtype of x. Absent: torch's default dtype, without a cast.
  TORCH_ARG(std::optional<torch::Dtype>, expert_dtype) = std::nullopt;
  // Weight of the importance loss.
  TORCH_ARG(double, w_importance) = 0.1;
  // Weight of the load loss.
  TORCH_ARG(double, w_load) = 0.1;
  // Minimum standard deviation of the noise of the default gate.
  TORCH_ARG(double, noise_epsilon) = 1e-2;
  // Source of the noise of the default gate; absent: torch's global generator.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
  // A module that is a Gate, as a pointer or as a holder such as TopKGate(...); null: a
  // NoisyTopKGate with noise_epsilon and generator. A given gate excludes these two.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, gate) = nullptr;
  // A module that is an Experts, as a pointer or as a holder; null: FeedForwardExperts with
  // hidden_sizes, activation, bias and expert_dtype. Given experts exclude these four.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, experts) = nullptr;

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
};

// Computes y = sum_i G(x)_i E_i(x) (Eq. 1) with only the k chosen experts of each token.
//
// Children: gate and experts, whose parameters are named as in Python: "gate.w_gate",
// "experts.weight_0", ...
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
  std::tuple<Tensor, MoEAux> forward(const Tensor& x, const OptionalTensor& mask = std::nullopt);

  // The children.
  Gate& gate() const { return *gate_; }
  Experts& experts() const { return *experts_; }

  MoEOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(OptionalTensor())})

  // Replaces the children, which a copy of a module shares with it, by clones.
  void clone_children(const std::optional<torch::Device>& device);

 private:
  // Returns sum_i G(x)_i E_i(x) of routed tokens x.
  Tensor mixture(const Tensor& x, const Routing& routing, const ops::DispatchPlan& plan) const;

  std::shared_ptr<Gate> gate_;
  std::shared_ptr<Experts> experts_;
};
TORCH_MODULE(MoE);

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
  // See MoEOptions. gate: null means a HierarchicalNoisyTopKGate with noise_epsilon and
  // generator.
  TORCH_ARG(std::optional<std::vector<int64_t>>, hidden_sizes) = std::nullopt;
  TORCH_ARG(std::string, activation) = "relu";
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, recompute) = false;
  TORCH_ARG(std::optional<torch::Dtype>, expert_dtype) = std::nullopt;
  TORCH_ARG(double, w_importance) = 0.1;
  TORCH_ARG(double, w_load) = 0.1;
  TORCH_ARG(double, noise_epsilon) = 1e-2;
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, gate) = nullptr;
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, experts) = nullptr;

 public:
  // For hidden_sizes({1024}), which does not convert to std::optional.
  HierarchicalMoEOptions& hidden_sizes(std::initializer_list<int64_t> sizes) {
    return hidden_sizes(std::vector<int64_t>(sizes));
  }
  template <typename M>
  HierarchicalMoEOptions& gate(const torch::nn::ModuleHolder<M>& holder) {
    return gate(holder.ptr());
  }
  template <typename M>
  HierarchicalMoEOptions& experts(const torch::nn::ModuleHolder<M>& holder) {
    return experts(holder.ptr());
  }
};

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
