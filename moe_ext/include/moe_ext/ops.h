// The operators: one typed function each.
//
// Shapes: T tokens, D model width, E experts, K = k experts per token, R = T * K routed rows.
//
// Every function calls its operator through the dispatcher: autograd, autocast, CUDA, the meta
// device and torch::NoGradGuard work as for the functions of torch. The operators are pure
// functions of tensors, except factored_step_. Sums have a fixed order: results do not depend on
// the number of threads. Second derivatives throw, except for importance.
//
// Indices and offsets are int64. int32 is accepted but converted, which costs time.
//
// All functions throw c10::ValueError, c10::TypeError or c10::IndexError if an argument has a wrong
// shape, dtype, device or value. The message names operator, argument, rule and value. On CUDA,
// values of index tensors are not checked. CUDA is experimental: no kernel has run on a GPU yet.
//
// An undefined optional tensor is absent; any other undefined tensor is a c10::TypeError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "export.h"

namespace moe_ext::ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The result of noisy_topk_gating.
struct TopKSelection {
  // [T, K], the gates G(x) in order of decreasing noisy logit; each row sums to 1.
  Tensor gates;
  // [T, K] int64, the expert of each gate.
  Tensor expert_index;
  // [T, 2], the thresholds kth_excluding(H, k, i) of Appendix A. Column 0 is the k-th largest noisy
  // logit; an expert outside the top k must exceed it to enter. Column 1 is the (k+1)-th largest,
  // or -inf if k = E; an expert in the top k must exceed it to stay.
  Tensor threshold;
  // [T, 2] int64, the experts of the two thresholds. Column 1 is -1 if k = E.
  Tensor threshold_index;
  // [T, E], softplus(raw_noise_stddev) + noise_epsilon; [0, E] without noise.
  Tensor noise_stddev;
};

// Computes the gates of the k largest noisy logits of each token (Eqs. 3-5):
//
//   H = clean_logits + noise * (softplus(raw_noise_stddev) + noise_epsilon)
//   G = softmax(KeepTopK(H, k))
//
// The lower index wins a tie. NaN ranks below every number. gates, threshold and noise_stddev are
// differentiable with respect to clean_logits and raw_noise_stddev. They are float32 for
// half-precision inputs.
//
//   clean_logits: [T, E], x W_g.
//   raw_noise_stddev: [T, E], x W_noise; absent: no noise.
//   noise: [T, E], standard normal random values; absent: no noise.
//   k: experts per token, 1 <= k <= E.
//   noise_epsilon: minimum standard deviation of the noise.
MOE_EXT_API TopKSelection noisy_topk_gating(const Tensor& clean_logits,
                                            const OptionalTensor& raw_noise_stddev,
                                            const OptionalTensor& noise, int64_t k,
                                            double noise_epsilon = 1e-2);

// The result of topk_routing.
struct TopKRouting {
  Tensor gates;         // [T, K], in order of decreasing biased score or as given
  Tensor expert_index;  // [T, K] int64, the expert of each gate
};

// Selects k experts for each token by their scores, and computes their gates. With the scores
// s = score(logits), the gates of the chosen experts are
//
//   g_i = scale * s_i                        without renormalize
//   g_i = scale * s_i / sum_j s_j            with renormalize; j runs over the chosen experts
//
// The chosen experts have the largest s + bias. The bias does not enter the gates (arXiv
// 2408.15664). With groups of consecutive experts, a token selects in its groups_per_token best
// groups only (arXiv 2405.04434). A group's score is the sum of its group_score_k largest s + bias.
//
// The lower index wins a tie. NaN ranks below every number. gates are differentiable with respect
// to logits. They are float32 for half-precision inputs.
//
// With expert_index, the experts are given and nothing is selected: bias and groups have no effect.
// The gates are in the given order. With the expert_index of an earlier call, gates and gradients
// are bitwise identical to those of that call.
//
//   logits: [T, E].
//   k: experts per token.
//   bias: [E], in the dtype of the gates; absent: no bias.
//   score: "softmax", "sigmoid" or "sqrt_softplus".
//   renormalize: whether the gates of a token sum to scale.
//   scale: a factor of the gates.
//   num_groups: a divisor of E.
//   groups_per_token: groups in which a token selects.
//   group_score_k: experts that count for the score of a group; no effect with a single group.
//   expert_index: [T, K] int64, different experts for each token; absent: the experts are selected.
MOE_EXT_API TopKRouting topk_routing(const Tensor& logits, int64_t k,
                                     const OptionalTensor& bias = std::nullopt,
                                     std::string_view score = "softmax", bool renormalize = true,
                                     double scale = 1.0, int64_t num_groups = 1,
                                     int64_t groups_per_token = 1, int64_t group_score_k = 2,
                                     const OptionalTensor& expert_index = std::nullopt);

// Estimates the number of tokens of each expert, Load(X)_i = sum_x P(x, i) (Appendix A). P(x, i) is
// the probability that expert i is in the top k when only its own noise is redrawn:
//
//   P(x, i) = Phi((clean_logits_i - kth_excluding(H, k, i)) / noise_stddev_i)
//
//   clean_logits: [T, E].
//   noise_stddev, threshold, expert_index: see TopKSelection. A detached threshold blocks the
//     gradient through it.
//   group_offsets: [G + 1] int64, ascending from 0 to T. Group g has the rows
//     group_offsets[g] <= t < group_offsets[g + 1]. Absent: no groups.
//
// Returns [E], or [G, E] with group_offsets: the load of each group of rows (Appendix B).
MOE_EXT_API Tensor load(const Tensor& clean_logits, const Tensor& noise_stddev,
                        const Tensor& threshold, const Tensor& expert_index,
                        const OptionalTensor& group_offsets = std::nullopt);

// Sums the gates of each expert over all tokens, Importance(X) = sum_x G(x) (Eq. 6), [E].
//
//   gates: [T, K].
//   expert_index: [T, K] int64, the expert of each gate.
//   num_experts: E.
MOE_EXT_API Tensor importance(const Tensor& gates, const Tensor& expert_index, int64_t num_experts);

// Two statistics of a routing decision, in at least float32.
struct ImportanceAndLoad {
  // [E], the sum of the gates of each expert (Eq. 6).
  Tensor importance;
  // [E], the number of tokens of each expert, without gradient.
  Tensor load;
};

// Computes the importance and the exact load of each expert; see importance for the arguments.
MOE_EXT_API ImportanceAndLoad importance_and_load(const Tensor& gates, const Tensor& expert_index,
                                                  int64_t num_experts);

// Computes the squared coefficient of variation of values [E], population variance / mean^2 (Eq.
// 7): a scalar; 0 if all values are 0.
MOE_EXT_API Tensor cv_squared(const Tensor& values);

// Computes sum_j weights_j CV(values_j)^2 of vectors of one dtype: a scalar. Skips vectors whose
// weight is 0.
MOE_EXT_API Tensor weighted_cv_squared(at::TensorList values, at::ArrayRef<double> weights);

// The mask M_batchwise of G batches as the m selected rows of each of E experts.
struct BatchwiseTopM {
  // [G, E, m] int64, the rows of each expert in ascending order.
  Tensor row_index;
  // [G, E], the lowest selected score of each expert, without gradient; infinity if m = 0.
  Tensor mth_score;
};

// Selects for each expert the m rows with its largest scores: M_batchwise(X, m) (Appendix F). A
// fixed pseudo-random function of row and expert breaks ties. NaN ranks below every number.
//
//   scores: [G, N, E], G batches of N rows.
//   m: rows for each expert, 0 <= m <= N.
//   first_expert: the number of column 0 in batch 0, if scores has only some of the batches or
//     experts. Expert e of batch g has the number g * num_experts + e.
//   num_experts: the number of experts of a batch; absent: E. Ties break as if scores had all of
//     them.
MOE_EXT_API BatchwiseTopM batchwise_topm(const Tensor& scores, int64_t m, int64_t first_expert = 0,
                                         std::optional<int64_t> num_experts = std::nullopt);

// Computes the gates of the selected experts, [R]: the softmax over the logits that each token
// selected (Appendix F). A token without selected experts has no gates.
//
//   logits: [T, E].
//   expert_index: [R] int64, the selected experts, sorted by token.
//   token_offsets: [T + 1] int64; token t has the slots token_offsets[t] <= s <
//     token_offsets[t + 1].
MOE_EXT_API Tensor selected_softmax(const Tensor& logits, const Tensor& expert_index,
                                    const Tensor& token_offsets);

// Maps between the two orders of the (token, expert) assignments. Slots are the R assignments in
// the gate's order, sorted by token. Rows are the same assignments, sorted by expert, then by slot.
struct DispatchPlan {
  Tensor permutation;        // [R] int64, the slot of each row
  Tensor inverse;            // int64, in the shape of expert_index; the row of each slot
  Tensor tokens_per_expert;  // [E] int64, the number of tokens of each expert
  Tensor offsets;            // [E + 1] int64; expert e has rows offsets[e] <= r < offsets[e + 1]
};

// Sorts the (token, expert) assignments by expert with a stable counting sort in O(R + E).
//
//   expert_index: [T, K] or [R] int64, the expert of each assignment.
//   num_experts: E.
MOE_EXT_API DispatchPlan dispatch_plan(const Tensor& expert_index, int64_t num_experts);

// Copies each token to its rows: rows[inverse[s]] = x[t] for the slots s of token t. Returns [R, D]
// in the dtype of x.
//
//   x: [T, D].
//   inverse: [T, K] int64, or [R] with token_offsets; from dispatch_plan.
//   token_offsets: [T + 1] int64, as in selected_softmax. Absent: each token has K slots.
MOE_EXT_API Tensor dispatch(const Tensor& x, const Tensor& inverse,
                            const OptionalTensor& token_offsets = std::nullopt);

// Sums the expert outputs of each token, weighted by its gates (Eq. 1):
// y[t] = sum of gates[s] * expert_output[inverse[s]] over the slots s of token t. Returns [T, D].
//
//   expert_output: [R, D], rows sorted by expert.
//   gates: [T, K], or [R] with token_offsets; any floating-point dtype.
//   inverse, token_offsets: as in dispatch.
MOE_EXT_API Tensor combine(const Tensor& expert_output, const Tensor& gates, const Tensor& inverse,
                           const OptionalTensor& token_offsets = std::nullopt);

// Which rows belong to which expert and token; see experts.
struct ExpertsOptions {
  // [E + 1] int64; expert e has the rows offsets[e] <= r < offsets[e + 1]. Absent: R / E rows for
  // every expert.
  OptionalTensor offsets = std::nullopt;
  // [T, K] int64, or [R] with token_offsets. The row of each slot, from dispatch_plan.
  OptionalTensor inverse = std::nullopt;
  // The weight of each slot, in the shape of inverse and any floating-point dtype.
  OptionalTensor gates = std::nullopt;
  // [T + 1] int64, as in selected_softmax. Absent: each token has K slots.
  OptionalTensor token_offsets = std::nullopt;
  // Whether to save only x and recompute the hidden layers in the backward pass (App. D). Results
  // are bitwise identical.
  bool recompute = false;
};

// A low-rank adapter of a layer of E experts (LoRA, arXiv:2106.09685): a layer with the input h
// adds scale (h a) b. Without tensors, the layer has no adapter.
struct LoRA {
  Tensor a = {};  // [E, fan_in, rank], in the dtype of x
  Tensor b = {};  // [E, rank, width]
  double scale = 1.0;
  // Dropout: bool [R, fan_in], in the order of the rows. a sees 0 in place of the numbers of h
  // where it is false; `scale` must include 1 / (1 - p).
  Tensor mask = {};
};

// Applies each expert to its rows: linear layers with an activation between them.
//
//   - Without inverse and gates, x and the result are rows sorted by expert: [R, D] -> [R, D_out].
//   - With inverse, x are tokens [T, D]. The operator copies them to their rows as dispatch does.
//   - With inverse and gates, it also sums the outputs of each token as combine does, and returns
//     [T, D_out]: all of Eq. 1 in one operator.
//
//   weights: [E, D, F_1], [E, F_1, F_2], ..., [E, F_n, D_out]. Before a gated activation, the
//     weight has twice the layer's width. A weight is read without a copy if it is contiguous or
//     the view p.mT() of a contiguous p [E, F, D]. Its gradient has the same memory layout.
//   biases: one [E, width] for each weight, or empty.
//   activation: "clamped_swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "glu", "identity",
//     "interleaved_clamped_swiglu", "reglu", "relu", "relu_squared", "sigmoid", "silu", "swiglu" or
//     "tanh".
//   activation_args: limit > 0, alpha and offset of a clamped activation, else empty. It computes
//     g * sigmoid(alpha * g) * (u + offset); g = min(a, limit) and u = clamp(b, -limit, limit).
//
//   auto y = experts(x, {w1, w2}, {}, "relu",
//                    {.offsets = plan.offsets, .inverse = plan.inverse, .gates = top.gates});
MOE_EXT_API Tensor experts(const Tensor& x, at::TensorList weights, at::TensorList biases = {},
                           std::string_view activation = "relu", const ExpertsOptions& options = {},
                           at::ArrayRef<double> activation_args = {}, at::ArrayRef<LoRA> lora = {});

// The packed weights of a layer: codes of 4 to 8 bits, and one scale for a group of inputs.
// Python's moe_ext.formats.PackedWeight makes them from the layouts of files.
struct PackedWeight {
  Tensor panels;            // uint8 [E, ceil(outputs / 16), bytes]
  std::string_view format;  // such as "mxfp4"
  int64_t group;            // the number of inputs with one scale
  int64_t outputs;          // the number of outputs
};

// Applies each expert to its rows, as experts, with weights that stay packed. The result is that of
// experts with the numbers that the codes stand for, in the dtype of x. The weights are frozen; x,
// gates, biases and adapters have gradients.
//
//   weights: one for each layer.
//   arithmetic: "exact", or "integer" for inference: the inputs of a layer are rounded to int8 in
//     segments of up to 32.
//
// The other arguments are those of experts; the biases have the dtype of x.
MOE_EXT_API Tensor packed_experts(const Tensor& x, at::ArrayRef<PackedWeight> weights,
                                  at::TensorList biases = {}, std::string_view activation = "relu",
                                  const ExpertsOptions& options = {},
                                  at::ArrayRef<double> activation_args = {},
                                  std::string_view arithmetic = "exact",
                                  at::ArrayRef<LoRA> lora = {});

// How the losses of the tokens are computed and reduced; see linear_cross_entropy.
struct LinearCrossEntropyOptions {
  // [V], may be float32 if the others have half precision; absent: no bias.
  OptionalTensor linear_bias = std::nullopt;
  // "mean" over the tokens that are not ignored, "sum", or "none".
  std::string_view reduction = "mean";
  // The target of tokens without loss and gradient.
  int64_t ignore_index = -100;
  // eps in [0, 1], the weight of the uniform distribution.
  double label_smoothing = 0.0;
  // The weight of the squared log-sum-exp.
  double z_loss = 0.0;
  // c > 0: each logit l becomes c tanh(l / c).
  std::optional<double> softcap = std::nullopt;
  // Whether to save only the log-sum-exp for the backward pass, not the gradients. Results agree to
  // rounding.
  bool recompute = false;
};

// Computes the cross-entropy of the V classes of a linear layer, such as the next words. With the
// logits l = input linear_weight^T + linear_bias, the loss of token t is
//
//   loss_t = lse_t - (1 - eps) l_t,target - eps mean_v(l_tv) + z_loss lse_t^2
//   lse_t = ln sum_v exp(l_tv)
//
// The [T, V] logits are never in memory. If the loss is reduced, the forward pass computes
// the required gradients. The backward pass only scales them. With
// "none" or recompute, the backward pass recomputes the logits.
//
//   input: [T, D].
//   linear_weight: [V, D].
//   target: [T] int64, in [0, V) or ignore_index. On CUDA, the loss of another target is NaN.
//
// Returns a scalar in nats, or [T] with "none"; float32 for half-precision inputs.
MOE_EXT_API Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight,
                                        const Tensor& target,
                                        const LinearCrossEntropyOptions& options = {});

// The outputs of lstm.
struct LstmOutputs {
  Tensor m;    // [B, S, P], zero after the tokens of a sentence
  Tensor m_n;  // [B, P], the output of the last step
  Tensor c_n;  // [B, U], the state of the cells after the last step
};

// Runs an LSTM of U units over B sentences of at most S tokens (Sak et al., 2014):
//
//   i, f, j, o = weight_input x_t + weight_recurrent m_{t-1} + bias
//   c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j)
//   m_t = projection (sigmoid(o) tanh(c_t))
//
// CUDA does not check the values of lengths.
//
//   x: [B, S, D].
//   weight_input: [4 U, D].
//   weight_recurrent: [4 U, P].
//   bias: [4 U]; absent: no bias.
//   projection: [P, U]; absent: m_t = sigmoid(o) * tanh(c_t), and P = U.
//   m_0: [B, P], the output before the first step; absent: zeros.
//   c_0: [B, U], the state of the cells before the first step; absent: zeros.
//   lengths: [B] int64, the number of tokens of each sentence; absent: S.
//   reverse: whether the steps go from the last token of a sentence to its first.
MOE_EXT_API LstmOutputs lstm(const Tensor& x, const Tensor& weight_input,
                             const Tensor& weight_recurrent,
                             const OptionalTensor& bias = std::nullopt,
                             const OptionalTensor& projection = std::nullopt,
                             const OptionalTensor& m_0 = std::nullopt,
                             const OptionalTensor& c_0 = std::nullopt,
                             const OptionalTensor& lengths = std::nullopt, bool reverse = false);

// The state of an LSTM after a step, each [B, U].
struct LstmCell {
  Tensor h;
  Tensor c;
};

// Computes the cells of one step of an LSTM, whose gates the caller computes:
//
//   i, f, j, o = gates
//   c = sigmoid(f) c_0 + sigmoid(i) tanh(j)
//   h = sigmoid(o) tanh(c)
//
//   gates: [B, 4 U], the concatenation of i, f, j and o.
//   c_0: [B, U], the state of the cells before the step, in the dtype of gates.
MOE_EXT_API LstmCell lstm_cell(const Tensor& gates, const Tensor& c_0);

// Updates param [..., R, C] by one step of factored Adam or Adagrad (Appendix D):
//
//   row    <- decay * row    + gain * mean over the columns of grad^2      [..., R]
//   column <- decay * column + gain * mean over the rows of grad^2         [..., C]
//   param  <- param - lr * grad / (sqrt(row column^T / mean(row) * correction) + eps)
//
//   lr, correction: float64 scalars on the device of param or on the CPU.
//   mean_of_roots: see FactoredAdamOptions in optim.h.
MOE_EXT_API void factored_step_(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column,
                                const Tensor& lr, const Tensor& correction, double decay,
                                double gain, double eps, bool mean_of_roots = false);

}  // namespace moe_ext::ops
