// Gates whose experts select their tokens: strictly balanced gating (Appendix F), on one level and
// on two levels (Appendix B), and expert choice (arXiv 2202.09368).
#include <moe_ext/nn.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <ostream>

#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {
namespace {

// Compares the threshold mask with the batchwise mask.
struct Agreement {
  Tensor loss;           // L_batchwise
  Tensor num_differing;  // number of (token, expert) pairs that only one of the masks selects
  Tensor num_selected;   // number of pairs in one mask plus number of pairs in the other mask
};

// A mask over N rows and E experts as a list of (row, expert) pairs.
struct Mask {
  // [R] int64, the selected experts, sorted by row, then by expert.
  Tensor expert_index;
  // [N + 1] int64; row n has the entries row_offsets[n] <= i < row_offsets[n + 1].
  Tensor row_offsets;
  // How the threshold and batchwise masks compare; absent for a threshold mask.
  std::optional<Agreement> agreement = std::nullopt;
};

// The parameters and the flag of one level.
struct Thresholds {
  Tensor threshold;
  Tensor initialized;
};

// Returns the offsets [N + 1] of ranges with the sizes `counts` [N].
Tensor offsets_of(const Tensor& counts) { return at::constant_pad_nd(counts.cumsum(0), {1, 0}); }

// Computes m = k T / E, rounded to the nearest whole number (half up), but at least 1 if T > 0.
int64_t rows_per_expert(int64_t k, int64_t num_rows, int64_t num_experts) {
  return std::max(std::min<int64_t>(1, num_rows),
                  (2 * k * num_rows + num_experts) / (2 * num_experts));
}

// Returns the relative distance of the numbers of a type, and the smallest positive number.
std::pair<double, double> spacing(at::ScalarType type) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "BalancedGate", [] {
    using Limits = std::numeric_limits<scalar_t>;
    return std::pair<double, double>(Limits::epsilon(), Limits::denorm_min());
  });
}

// Sets the threshold just below mth_score in the first batch where all these scores are finite.
//
// The threshold and batchwise masks then agree on this batch. The margin of 16 eps covers rounding:
// on CUDA, the GEMM of evaluation mode may round differently. A threshold in half precision is
// rounded down. Later batches write the old threshold again, because reading the flag on the host
// would synchronize.
void initialize(Thresholds& level, const Tensor& mth_score) {
  const torch::NoGradGuard no_grad;
  const auto finite = mth_score.isfinite().all();
  auto start = mth_score * (1 - 16 * spacing(mth_score.scalar_type()).first);
  const auto lowest = at::full_like(start, -std::numeric_limits<double>::infinity());
  start = at::nextafter(start, lowest);  // lowers a score of 0 too
  const auto type = level.threshold.scalar_type();
  const auto [eps, least] = spacing(type);
  const auto lower = (start * (1 - eps) - least).to(type);
  const auto rounded = start.to(type);
  start = at::where(rounded < mth_score, rounded, lower);
  const auto keeps = level.initialized.logical_or(finite.logical_not());
  auto& threshold = level.threshold;
  threshold.copy_(at::where(keeps, threshold, start.view_as(threshold)));
  level.initialized.logical_or_(finite);
}

// Selects the experts with scores [N, E] above the threshold; synchronizes with the device. NaN
// scores are selected too: otherwise NaN rows would silently get the output 0.
Mask by_threshold(const Tensor& scores, const Tensor& threshold) {
  const auto mask = (scores <= threshold).logical_not();
  return {mask.nonzero().select(1, 1).contiguous(), offsets_of(mask.sum(1))};
}

// Returns the mask that selects row_index [G, E, m], the rows of each expert. Each of the G groups
// has num_rows rows.
Mask mask_of_selected(const Tensor& row_index, int64_t num_rows) {
  const auto num_groups = row_index.size(0), num_experts = row_index.size(1);
  const auto first_row = at::arange(num_groups, row_index.options()) * num_rows;
  const auto row = row_index + first_row.view({-1, 1, 1});
  // The counting sort of dispatch_plan turns the rows of each expert into the experts of each row.
  // An entry has the position (g * E + e) * m + i.
  const auto plan = ops::dispatch_plan(row.view(-1), num_groups * num_rows);
  const auto m = std::max<int64_t>(row_index.size(2), 1);
  return {plan.permutation.floor_divide(m).remainder(num_experts), plan.offsets};
}

// Computes M_batchwise(X, m) for scores [R, E] of G equally large groups of rows. A row has k
// experts on average. In training mode, the first batch sets the thresholds.
Mask by_batch(const Tensor& scores, int64_t k, Thresholds level, bool training) {
  const auto num_experts = scores.size(1);
  const auto num_groups = level.threshold.numel() / num_experts;
  const auto num_rows = scores.size(0) / num_groups;
  const auto grouped = scores.view({num_groups, num_rows, num_experts});
  const auto m = rows_per_expert(k, num_rows, num_experts);
  const auto [row_index, mth_score] = ops::batchwise_topm(grouped.detach(), m);
  if (training) initialize(level, mth_score);

  const auto mask = at::zeros_like(grouped, at::kBool).scatter(1, row_index.mT(), true);
  const auto bound = level.threshold.to(scores.scalar_type()).view({num_groups, num_experts});
  const auto passes = grouped > bound.unsqueeze(-2);
  const Agreement agreement{.loss = batchwise_loss(grouped, bound, mask),
                            .num_differing = (passes != mask).count_nonzero(),
                            .num_selected = passes.count_nonzero() + mask.count_nonzero()};

  auto selected = mask_of_selected(row_index, num_rows);
  selected.agreement = agreement;
  return selected;
}

// Computes softmax(logits), the scores by which the masks select.
Tensor scores_of(const Tensor& logits, bool detach) {
  return at::softmax(detach ? logits.detach() : logits, -1);
}

// Makes a Routing from gates, expert_index and token_offsets. The masks of the levels give its loss
// and metrics.
Routing routing_of(const Tensor& gates, const Tensor& expert_index, const Tensor& token_offsets,
                   int64_t num_experts, at::ArrayRef<Mask> masks) {
  const auto [importance, load] =
      ops::importance_and_load(gates.unsqueeze(1), expert_index.unsqueeze(1), num_experts);
  Routing routing{
      .gates = gates,
      .expert_index = expert_index,
      .importance = importance,
      .load = load,
      .token_offsets = token_offsets,
  };
  // A tensor, because CUDA multiplies by the reciprocal of a number.
  const auto num_tokens =
      at::full({}, std::max<int64_t>(token_offsets.size(0) - 1, 1), gates.options());
  const auto num_without = (token_offsets.diff() == 0).count_nonzero().to(gates.scalar_type());
  routing.metrics["share_without_expert"] = num_without / num_tokens;

  std::optional<Agreement> total;
  for (const auto& mask : masks) {
    if (!mask.agreement) continue;
    const auto& [loss, num_differing, num_selected] = *mask.agreement;
    total = !total ? *mask.agreement
                   : Agreement{total->loss + loss, total->num_differing + num_differing,
                               total->num_selected + num_selected};
  }
  if (total) {
    routing.equal_load = true;
    routing.loss = total->loss / num_tokens;
    routing.metrics["mask_disagreement"] =
        total->num_differing.to(gates.scalar_type()) / total->num_selected.clamp_min(1);
  }
  return routing;
}

// Moves a gate as Module::to does, but keeps its flags bool. Module::to converts every buffer.
template <typename... Target>
void move(torch::nn::Module& gate, std::initializer_list<Tensor*> flags, Target... target) {
  gate.torch::nn::Module::to(target...);
  for (Tensor* flag : flags) flag->set_data(flag->to(torch::kBool));
}

}  // namespace

BalancedGateOptions::BalancedGateOptions(int64_t d_model, int64_t num_experts, int64_t k)
    : d_model_(d_model), num_experts_(num_experts), k_(k) {}

BalancedGateImpl::BalancedGateImpl(const BalancedGateOptions& options)
    : Gate(options.d_model(), options.num_experts(), options.k(), "BalancedGate"),
      options(options) {
  reset();
}

void BalancedGateImpl::reset() {
  w_gate = register_parameter("w_gate", torch::empty({d_model(), num_experts()}));
  threshold = register_parameter("threshold", torch::empty(num_experts()));
  initialized = register_buffer("initialized", torch::empty({}, torch::kBool));
  reset_parameters();
}

void BalancedGateImpl::reset_parameters() {
  for (const auto& parameter : parameters()) torch::nn::init::zeros_(parameter);
  initialized.zero_();
}

void BalancedGateImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "moe_ext::nn::BalancedGate(d_model=" << d_model()
         << ", num_experts=" << num_experts() << ", k=" << k()
         << ", detach_scores=" << options.detach_scores() << ")";
}

void BalancedGateImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  move(*this, {&initialized}, device, dtype, non_blocking);
}

void BalancedGateImpl::to(torch::Dtype dtype, bool non_blocking) {
  move(*this, {&initialized}, dtype, non_blocking);
}

void BalancedGateImpl::to(torch::Device device, bool non_blocking) {
  move(*this, {&initialized}, device, non_blocking);
}

Routing BalancedGateImpl::forward(const Tensor& x) {
  require_tokens("BalancedGate", x, d_model());
  const auto gate_logits = logits(x, w_gate);
  const auto scores = scores_of(gate_logits, options.detach_scores());
  const auto mask = is_training() || batchwise
                        ? by_batch(scores, k(), {threshold, initialized}, is_training())
                        : by_threshold(scores, threshold);
  const auto gates = ops::selected_softmax(gate_logits, mask.expert_index, mask.row_offsets);
  auto routing = routing_of(gates, mask.expert_index, mask.row_offsets, num_experts(), mask);
  routing.logits = gate_logits;
  return routing;
}

HierarchicalBalancedGateOptions::HierarchicalBalancedGateOptions(int64_t d_model,
                                                                 int64_t num_groups,
                                                                 int64_t experts_per_group,
                                                                 std::array<int64_t, 2> k)
    : d_model_(d_model), num_groups_(num_groups), experts_per_group_(experts_per_group), k_(k) {}

HierarchicalBalancedGateImpl::HierarchicalBalancedGateImpl(
    const HierarchicalBalancedGateOptions& options)
    : Gate(options.d_model(),
           num_experts_of_levels("HierarchicalBalancedGate", options.d_model(),
                                 options.num_groups(), options.experts_per_group(), options.k()),
           k_of_levels("HierarchicalBalancedGate", options.k()), "HierarchicalBalancedGate"),
      options(options) {
  reset();
}

void HierarchicalBalancedGateImpl::reset() {
  const auto a = options.num_groups(), b = options.experts_per_group();
  w_gate = register_parameter("w_gate", torch::empty({d_model(), a}));
  threshold = register_parameter("threshold", torch::empty(a));
  initialized = register_buffer("initialized", torch::empty({}, torch::kBool));
  w_gate_secondary = register_parameter("w_gate_secondary", torch::empty({a, d_model(), b}));
  threshold_secondary = register_parameter("threshold_secondary", torch::empty({a, b}));
  initialized_secondary = register_buffer("initialized_secondary", torch::empty({}, torch::kBool));
  reset_parameters();
}

void HierarchicalBalancedGateImpl::reset_parameters() {
  for (const auto& parameter : parameters()) torch::nn::init::zeros_(parameter);
  initialized.zero_();
  initialized_secondary.zero_();
}

void HierarchicalBalancedGateImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "moe_ext::nn::HierarchicalBalancedGate(d_model=" << d_model()
         << ", num_groups=" << options.num_groups()
         << ", experts_per_group=" << options.experts_per_group() << ", k=" << tuple_of(options.k())
         << ", detach_scores=" << options.detach_scores() << ")";
}

void HierarchicalBalancedGateImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  move(*this, {&initialized, &initialized_secondary}, device, dtype, non_blocking);
}

void HierarchicalBalancedGateImpl::to(torch::Dtype dtype, bool non_blocking) {
  move(*this, {&initialized, &initialized_secondary}, dtype, non_blocking);
}

void HierarchicalBalancedGateImpl::to(torch::Device device, bool non_blocking) {
  move(*this, {&initialized, &initialized_secondary}, device, non_blocking);
}

Routing HierarchicalBalancedGateImpl::forward(const Tensor& x) {
  require_tokens("HierarchicalBalancedGate", x, d_model());
  const auto [k1, k2] = options.k();
  const bool by_batches = is_training() || batchwise;
  const auto wide = widened(x);
  const auto primary_logits = logits(wide, w_gate);
  const auto group_scores = scores_of(primary_logits, options.detach_scores());
  const auto groups = by_batches
                          ? by_batch(group_scores, k1, {threshold, initialized}, is_training())
                          : by_threshold(group_scores, threshold);

  // The rows of X^(1), X^(2), ...: one for each slot (token, chosen group). With the batchwise
  // mask, all groups have equally many rows.
  const auto plan = ops::dispatch_plan(groups.expert_index, options.num_groups());
  const auto secondary_logits =
      logits(wide, w_gate_secondary,
             {.offsets = by_batches ? std::nullopt : OptionalTensor(plan.offsets),
              .inverse = plan.inverse,
              .token_offsets = groups.row_offsets});
  const auto scores = scores_of(secondary_logits, options.detach_scores());
  const auto thresholds_of_rows = [&] {
    const auto group = groups.expert_index.index_select(0, plan.permutation);
    return threshold_secondary.index_select(0, group);
  };
  const auto experts =
      by_batches ? by_batch(scores, k2, {threshold_secondary, initialized_secondary}, is_training())
                 : by_threshold(scores, thresholds_of_rows());

  const auto primary_gates =
      ops::selected_softmax(primary_logits, groups.expert_index, groups.row_offsets);
  const auto secondary_gates =
      ops::selected_softmax(secondary_logits, experts.expert_index, experts.row_offsets);
  // Reorder from rows to slots; each slot has the experts of its row.
  const auto first = experts.row_offsets.slice(0, 0, -1).index_select(0, plan.inverse);
  const auto num_chosen = experts.row_offsets.diff().index_select(0, plan.inverse);
  const auto slot_offsets = offsets_of(num_chosen);
  const std::optional<int64_t> num_slots = secondary_gates.size(0);
  const auto slot = at::repeat_interleave(num_chosen, num_slots);
  const auto place = at::arange(slot.size(0), slot.options());
  const auto source = place + (first - slot_offsets.slice(0, 0, -1)).index_select(0, slot);
  const auto group_gates =
      ops::dispatch(primary_gates.unsqueeze(1), place, slot_offsets).squeeze(1);
  const auto gates = group_gates * secondary_gates.index_select(0, source);
  const auto expert_index =
      groups.expert_index.index_select(0, slot) * options.experts_per_group() +
      experts.expert_index.index_select(0, source);
  const auto token_offsets = slot_offsets.index_select(0, groups.row_offsets);
  return routing_of(gates, expert_index, token_offsets, num_experts(), {groups, experts});
}

ExpertChoiceGateImpl::ExpertChoiceGateImpl(int64_t d_model, int64_t num_experts, int64_t k)
    : Gate(d_model, num_experts, k, "ExpertChoiceGate") {
  reset();
}

void ExpertChoiceGateImpl::reset() {
  w_gate = register_parameter("w_gate", torch::empty({d_model(), num_experts()}));
  reset_parameters();
}

void ExpertChoiceGateImpl::reset_parameters() { torch::nn::init::zeros_(w_gate); }

void ExpertChoiceGateImpl::pretty_print(std::ostream& stream) const {
  stream << "moe_ext::nn::ExpertChoiceGate(d_model=" << d_model()
         << ", num_experts=" << num_experts() << ", k=" << k() << ")";
}

Routing ExpertChoiceGateImpl::forward(const Tensor& x) {
  require_tokens("ExpertChoiceGate", x, d_model());
  const auto gate_logits = logits(x, w_gate);
  const auto scores = at::softmax(gate_logits, -1);
  const auto num_tokens = scores.size(0);
  const auto m = rows_per_expert(k(), num_tokens, num_experts());
  // NaN rows are selected first: otherwise they would silently get the output 0.
  const auto ranked = scores.detach().nan_to_num(std::numeric_limits<double>::infinity());
  const auto selected = ops::batchwise_topm(ranked.unsqueeze(0), m);
  const auto mask = mask_of_selected(selected.row_index, num_tokens);
  const std::optional<int64_t> num_slots = mask.expert_index.size(0);
  const auto token = at::repeat_interleave(mask.row_offsets.diff(), num_slots);
  const auto gates = scores.view(-1).index_select(0, token * num_experts() + mask.expert_index);
  auto routing = routing_of(gates, mask.expert_index, mask.row_offsets, num_experts(), mask);
  routing.equal_load = true;
  routing.logits = gate_logits;
  return routing;
}

}  // namespace moe_ext::nn
