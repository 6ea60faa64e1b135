// The schema of every operator, under its equation.
//
// T tokens, D model width, E experts, K = k experts per token, R = T * K routed rows, F output
// width.
#include <torch/library.h>

TORCH_LIBRARY(moe_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};

  // Eq. 4: H = clean_logits + noise * (softplus(raw_noise_stddev) + noise_epsilon);
  // Eqs. 3, 5: gates = softmax(KeepTopK(H, k)), kept values only.
  // threshold [T, 2] is kth_excluding (App. A): column 0 for experts outside the top k, column 1
  // for experts inside it.
  m.def(
      "noisy_topk_gating(Tensor clean_logits, Tensor? raw_noise_stddev, Tensor? noise, SymInt k, "
      "float noise_epsilon) -> (Tensor gates, Tensor expert_index, Tensor threshold, "
      "Tensor threshold_index, Tensor noise_stddev)",
      tags);
  m.def(
      "_noisy_topk_gating_backward(Tensor? grad_gates, Tensor? grad_threshold, "
      "Tensor? grad_noise_stddev, Tensor gates, Tensor expert_index, Tensor threshold_index, "
      "Tensor clean_logits, Tensor? raw_noise_stddev, Tensor? noise) -> (Tensor, Tensor)",
      tags);

  // The routers of later models, whose gates are
  //   g_i = scale s_i, or with renormalize g_i = scale s_i / sum_j s_j over the chosen experts j,
  // with scores s = score(logits). Selects the k experts with the largest s + bias in the
  // groups_per_token groups with the largest scores. A group's score is the sum of its
  // group_score_k largest s + bias. With expert_index [T, K], the experts are given.
  m.def(
      "topk_routing(Tensor logits, SymInt k, Tensor? bias=None, str score='softmax', "
      "bool renormalize=True, float scale=1.0, SymInt num_groups=1, SymInt groups_per_token=1, "
      "SymInt group_score_k=2, Tensor? expert_index=None) -> (Tensor gates, Tensor expert_index)",
      tags);
  m.def(
      "_topk_routing_backward(Tensor grad_gates, Tensor logits, Tensor expert_index, str score, "
      "bool renormalize, float scale) -> Tensor",
      tags);

  // counts <- counts + load, unless a backward pass is running: then the call is a recomputation of
  // one that has been counted.
  m.def("_count_tokens_(Tensor(a!) counts, Tensor load) -> ()", tags);

  // App. A: Load(X)_i = sum_x Phi((clean_i - kth_excluding(H, k, i)) / noise_stddev_i). App. B:
  // with group_offsets [G + 1], the result is Load_i(X^(i)) for each group i of rows.
  m.def(
      "load(Tensor clean_logits, Tensor noise_stddev, Tensor threshold, Tensor expert_index, "
      "Tensor? group_offsets) -> Tensor",
      tags);
  m.def(
      "_load_backward(Tensor grad_load, Tensor clean_logits, Tensor noise_stddev, "
      "Tensor threshold, Tensor expert_index, Tensor? group_offsets) -> (Tensor, Tensor, Tensor)",
      tags);

  // App. F, M_batchwise(X, m): for each of G batches, the m rows with the largest scores in each
  // column. Shapes: scores [G, N, E]; row_index [G, E, m], ascending; mth_score [G, E]. The batches
  // and columns may be a shard of batches of num_experts experts. Its first column then has the
  // number first_expert.
  m.def(
      "batchwise_topm(Tensor scores, SymInt m, SymInt first_expert=0, SymInt? num_experts=None) "
      "-> (Tensor row_index, Tensor mth_score)",
      tags);

  // App. F: G(x)_i = G_sigma(x)_i M_i / sum_j G_sigma(x)_j M_j. This is the softmax over the logits
  // of the experts that token t selected: expert_index[s] for token_offsets[t] <= s <
  // token_offsets[t + 1].
  m.def("selected_softmax(Tensor logits, Tensor expert_index, Tensor token_offsets) -> Tensor",
        tags);
  m.def(
      "_selected_softmax_backward(Tensor grad_gates, Tensor gates, Tensor expert_index, "
      "Tensor token_offsets, SymInt num_experts) -> Tensor",
      tags);

  // Eq. 6: Importance(X) = sum_x G(x)
  m.def("importance(Tensor gates, Tensor expert_index, SymInt num_experts) -> Tensor", tags);

  // Importance(X), and the exact number of tokens of each expert
  m.def(
      "importance_and_load(Tensor gates, Tensor expert_index, SymInt num_experts) "
      "-> (Tensor importance, Tensor load)",
      tags);

  // Eq. 7: sum_j weights_j CV(values_j)^2, where CV(v)^2 = population variance / mean^2 of v [E]; 0
  // if all v are 0
  m.def("weighted_cv_squared(Tensor[] values, float[] weights) -> Tensor", tags);
  m.def("_weighted_cv_squared_backward(Tensor grad, Tensor[] values, float[] weights) -> Tensor[]",
        tags);

  // See routing.h for slots, rows and offsets. The permutation [R] maps a row to its slot. The
  // inverse maps a slot to its row; it has the shape of expert_index, [T, K] or [R]. Shapes:
  // tokens_per_expert [E], offsets [E + 1].
  m.def(
      "dispatch_plan(Tensor expert_index, SymInt num_experts) -> (Tensor permutation, "
      "Tensor inverse, Tensor tokens_per_expert, Tensor offsets)",
      tags);

  // rows[inverse[s]] = x[t] for each slot s of token t
  m.def("dispatch(Tensor x, Tensor inverse, Tensor? token_offsets) -> Tensor", tags);
  m.def("_dispatch_backward(Tensor grad_rows, Tensor inverse, Tensor? token_offsets) -> Tensor",
        tags);

  // Uninitialized rows like the rows of x, for received rows. CPUs reuse the memory of freed rows.
  m.def("_empty_rows(Tensor x, SymInt num_rows) -> Tensor", tags);

  // Eq. 1: y[t] = sum of gates[s] * expert_output[inverse[s]] over the slots s of token t
  m.def(
      "combine(Tensor expert_output, Tensor gates, Tensor inverse, Tensor? token_offsets) "
      "-> Tensor",
      tags);
  m.def(
      "_combine_backward(Tensor grad_y, Tensor expert_output, Tensor gates, Tensor inverse, "
      "Tensor? token_offsets) -> (Tensor, Tensor)",
      tags);

  // The expert networks E_e: linear layers with an activation between them. Expert e processes the
  // rows offsets[e] <= r < offsets[e + 1]; without offsets, every expert has R / E rows. The input
  // x holds rows or, with inverse, tokens as in dispatch. The output y holds rows or, with gates,
  // tokens as in combine (Eq. 1). Returns y and, with keep_hidden, hidden: the pre-activations
  // [R, columns] of each layer but the last, on CUDA without the biases. Only backward on the same
  // device reads hidden.
  // With formats, the weights are packed: see packed.h. Layer l has the format, the group and the
  // columns of these lists, and its weights are frozen. With lora_a [E, fan_in, rank] and lora_b
  // [E, rank, columns] of each layer, a layer with the input A adds scale (A lora_a) lora_b; if
  // both have shape [0], it adds nothing. lora_masks, bool [R, fan_in], are those of dropout.
  m.def(
      "experts(Tensor x, Tensor? offsets, Tensor? inverse, Tensor? token_offsets, Tensor? gates, "
      "Tensor[] weights, Tensor[]? biases, str activation, bool keep_hidden, "
      "float[]? activation_args=None, str[]? formats=None, int[]? groups=None, "
      "int[]? columns=None, str arithmetic='exact', Tensor[]? lora_a=None, "
      "Tensor[]? lora_b=None, float[]? lora_scales=None, Tensor[]? lora_masks=None) "
      "-> Tensor[]",
      tags);
  // Returns the gradients of x, gates and the parameters: weights, biases, lora_a and lora_b.
  // Recomputes hidden if it is empty. A gradient that is not needed has shape [0]. The others have
  // the memory layout of their parameter.
  m.def(
      "_experts_backward(Tensor grad_y, Tensor x, Tensor? offsets, Tensor? inverse, "
      "Tensor? token_offsets, Tensor? gates, Tensor[] weights, Tensor[]? biases, Tensor[] hidden, "
      "str activation, bool needs_x, bool[] needs_parameters, float[]? activation_args=None, "
      "str[]? formats=None, int[]? groups=None, int[]? columns=None, Tensor[]? lora_a=None, "
      "Tensor[]? lora_b=None, float[]? lora_scales=None, Tensor[]? lora_masks=None) "
      "-> Tensor[]",
      tags);
  // x W in at least float32, also under autocast, for each of the weights W, [D, E] or [G, D, E].
  // The rows of x are those of experts: with G groups of rows, each has a matrix of its own. On the
  // CPU, a row of the result does not depend on the other rows.
  m.def(
      "_logits(Tensor x, Tensor[] weights, Tensor? offsets=None, Tensor? inverse=None, "
      "Tensor? token_offsets=None) -> Tensor[]",
      tags);

  // The cross-entropy of the classes with logits l = input linear_weight^T + linear_bias, or l =
  // c tanh(./c) of them with softcap c: loss_t = lse_t - (1 - eps) l_t,target - eps mean_v l_tv +
  // z_loss lse_t^2, where lse_t = ln sum_v e^l_tv and eps is label_smoothing.
  // Shapes: input [T, D], linear_weight [V, D], target [T]. Returns the loss, lse [T] and the
  // gradients. The loss is [T] or reduced over the tokens whose target is not ignore_index. Flags
  // in keep_gradients stand for input, linear_weight and linear_bias: whether to compute the
  // gradient of the reduced loss in forward. The others have shape [0].
  m.def(
      "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, "
      "Tensor? linear_bias, str reduction, int ignore_index, float label_smoothing, float z_loss, "
      "float? softcap, bool[] keep_gradients) "
      "-> Tensor[]",
      tags);
  // Scales the kept gradients; recomputes the logits if `gradients` is empty. A gradient that is
  // not needed has shape [0].
  m.def(
      "_linear_cross_entropy_backward(Tensor grad_loss, Tensor input, Tensor linear_weight, "
      "Tensor target, Tensor? linear_bias, str reduction, int ignore_index, "
      "float label_smoothing, float z_loss, float? softcap, Tensor lse, Tensor[] gradients, "
      "bool[] needs) -> Tensor[]",
      tags);

  // App. C.1: i, f, j, o = weight_input x_t + weight_recurrent m_{t-1} + bias;
  // c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j); m_t = projection (sigmoid(o) tanh(c_t)).
  // This is an LSTM of U units over B sentences of S tokens (Sak et al., 2014).
  // Without projection, m_t = sigmoid(o) * tanh(c_t). Without m_0 or c_0, the state starts at
  // zero. Sentence b has lengths[b] tokens, in their order or reversed; m is zero after them. m_n
  // and c_n are the states after the last step.
  // Shapes: x [B, S, D], weight_input [4 U, D], weight_recurrent [4 U, P], projection [P, U],
  // lengths [B], m [B, S, P]. The gates [B, S, 4 U] and the states of the cells [B, S, U] are saved
  // for the backward pass, in the order of the device.
  m.def(
      "lstm(Tensor x, Tensor weight_input, Tensor weight_recurrent, Tensor? bias=None, "
      "Tensor? projection=None, Tensor? m_0=None, Tensor? c_0=None, Tensor? lengths=None, "
      "bool reverse=False) "
      "-> (Tensor m, Tensor m_n, Tensor c_n, Tensor gates, Tensor cells)",
      tags);
  // The gradients of x, weight_input, weight_recurrent, bias, projection, m_0 and c_0. A gradient
  // that is not needed has shape [0].
  m.def(
      "_lstm_backward(Tensor? grad_m, Tensor? grad_m_n, Tensor? grad_c_n, Tensor x, "
      "Tensor weight_input, Tensor weight_recurrent, Tensor? projection, Tensor? m_0, Tensor? c_0, "
      "Tensor? lengths, bool reverse, Tensor m, Tensor gates, Tensor cells, bool[] needs) "
      "-> Tensor[]",
      tags);

  // The cells of one step, as in lstm: the gates [B, 4 U] are i, f, j, o before their activations.
  // c = sigmoid(f) c_0 + sigmoid(i) tanh(j); h = sigmoid(o) tanh(c). Shapes: c_0, h, c [B, U].
  m.def("lstm_cell(Tensor gates, Tensor c_0) -> (Tensor h, Tensor c)", tags);
  m.def(
      "_lstm_cell_backward(Tensor? grad_h, Tensor? grad_c, Tensor gates, Tensor c_0) "
      "-> (Tensor, Tensor)",
      tags);

  // App. D: row <- decay row + gain mean_j(grad^2); column likewise, with the mean over i. Then
  // param <- param - lr grad / (sqrt(row column^T / mean(row) correction) + eps). All three are
  // updated in place, for each matrix of param [..., R, C], with row [..., R] and column [..., C].
  m.def(
      "factored_step_(Tensor(a!) param, Tensor grad, Tensor(b!) row, Tensor(c!) column, Tensor lr, "
      "Tensor correction, float decay, float gain, float eps, bool mean_of_roots=False) -> ()",
      tags);
}
