// FactoredAdam (Appendix D).
#include <moe_ext/ops.h>
#include <moe_ext/optim.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <utility>

#include "checks.h"
#include "nn/checks.h"

namespace moe_ext::optim {

namespace {

using torch::optim::OptimizerParamGroup;

const FactoredAdamOptions& options_of(const OptimizerParamGroup& group) {
  return dynamic_cast<const FactoredAdamOptions&>(group.options());
}

void check_options(const FactoredAdamOptions& options) {
  constexpr auto owner = "FactoredAdam";
  const double beta2 = options.beta2();
  nn::require_at_least(owner, "beta2", beta2, std::numeric_limits<double>::lowest());
  TORCH_CHECK_VALUE(0 <= beta2 && beta2 < 1, owner, ": beta2 must be in [0, 1), got ", beta2);
  nn::require_at_least(owner, "lr", options.lr(), 0);
  nn::require_positive(owner, "eps", options.eps());
}

FactoredAdamParamState initial_state(const torch::Tensor& param,
                                     const FactoredAdamOptions& options) {
  FactoredAdamParamState state;
  const auto type = accumulate_type(param);
  if (options.factored() && param.dim() >= 2) {
    auto rows = param.sizes().vec();
    auto columns = rows;
    rows.pop_back();
    columns.erase(columns.end() - 2);
    state.row(param.new_zeros(rows, type));
    state.column(param.new_zeros(columns, type));
  } else {
    state.second_moment(torch::zeros_like(param, type));
  }
  return state;
}

// Checks a state that was read from a file.
void check_state(const FactoredAdamParamState& state, const torch::Tensor& param,
                 FactoredAdamOptions options) {
  const auto expected = initial_state(param, options.factored(state.row().defined()));
  const auto check = [](const char* name, const torch::Tensor& given, const torch::Tensor& like) {
    const auto text = [](const torch::Tensor& x) {
      return x.defined() ? c10::str(name_of(x.scalar_type()), " ", nn::tuple_of(x.sizes()))
                         : "undefined";
    };
    TORCH_CHECK_VALUE(text(given) == text(like), "FactoredAdam: ", name, " of the file must be ",
                      text(like), " for its parameter, got ", text(given));
  };
  TORCH_CHECK_VALUE(state.step() >= 0, "FactoredAdam: step of the file must be at least 0, got ",
                    state.step());
  check("row", state.row(), expected.row());
  check("column", state.column(), expected.column());
  check("second_moment", state.second_moment(), expected.second_moment());
}

void update(torch::Tensor& param, const torch::Tensor& grad, FactoredAdamParamState& state,
            const FactoredAdamOptions& options) {
  const int64_t step = state.step() + 1;
  const double beta2 = options.beta2();
  // row, column and mean(row) are each too small by 1 - beta2^t. Hence V is too small by it once.
  const double scale = 1 / (1 - std::pow(beta2, static_cast<double>(step)));
  const auto lr = torch::tensor(options.lr(), torch::kDouble);
  const auto correction = torch::tensor(scale, torch::kDouble);
  if (state.row().defined()) {
    ops::factored_step_(param, grad, state.row(), state.column(), lr, correction, beta2, 1 - beta2,
                        options.eps(), options.mean_of_roots());
  } else {
    auto& second_moment = state.second_moment();
    const auto g = grad.to(second_moment.scalar_type());
    second_moment.mul_(beta2).addcmul_(g, g, /*value=*/1 - beta2);
    // The quotient first: lr * g may overflow where the moment is infinite.
    param.sub_(lr * (g / ((second_moment * correction).sqrt_() + options.eps())));
  }
  state.step(step);
}

}  // namespace

FactoredAdamOptions::FactoredAdamOptions(double lr) : lr_(lr) {}

double FactoredAdamOptions::get_lr() const { return lr(); }
void FactoredAdamOptions::set_lr(double lr) { this->lr(lr); }

void FactoredAdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(mean_of_roots);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(factored);
}

void FactoredAdamOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, mean_of_roots);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, factored);
}

void FactoredAdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(column);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(second_moment);
}

void FactoredAdamParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, row);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, column);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, second_moment);
}

FactoredAdam::FactoredAdam(const std::vector<OptimizerParamGroup>& groups,
                           const FactoredAdamOptions& defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(),
                std::make_unique<FactoredAdamOptions>(defaults)) {
  for (const auto& group : groups) add_param_group(group);
}

FactoredAdam::FactoredAdam(std::vector<torch::Tensor> params, const FactoredAdamOptions& defaults)
    : FactoredAdam({OptimizerParamGroup(std::move(params))}, defaults) {}

void FactoredAdam::add_param_group(const OptimizerParamGroup& group) {
  const auto& options = group.has_options() ? group.options() : defaults();
  const auto* own = dynamic_cast<const FactoredAdamOptions*>(&options);
  TORCH_CHECK_TYPE(own, "FactoredAdam: options must be FactoredAdamOptions, got ",
                   c10::demangle(typeid(options).name()));
  check_options(*own);
  for (const auto& param : group.params()) {
    TORCH_CHECK_TYPE(!param.is_complex(), "FactoredAdam: params must be floating point, got torch.",
                     name_of(param.scalar_type()));
  }
  Optimizer::add_param_group(group);
  // Optimizer merges options with the defaults, but only the options of torch's own optimizers.
  param_groups().back().set_options(std::make_unique<FactoredAdamOptions>(*own));
}

torch::Tensor FactoredAdam::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (const auto& group : param_groups()) {
    check_options(options_of(group));
    for (const auto& param : group.params()) {
      const auto& grad = param.grad();
      TORCH_CHECK_TYPE(!grad.defined() || grad.layout() == torch::kStrided,
                       "FactoredAdam: gradients must be dense, got ",
                       grad.is_sparse() ? "torch.sparse_coo" : c10::str(grad.layout()));
    }
  }
  for (auto& group : param_groups()) {
    const auto& options = options_of(group);
    for (auto& param : group.params()) {
      if (!param.grad().defined()) continue;
      auto& state = this->state()[param.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<FactoredAdamParamState>(initial_state(param, options));
      update(param, param.grad(), static_cast<FactoredAdamParamState&>(*state), options);
    }
  }
  return loss;
}

void FactoredAdam::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<FactoredAdamParamState, FactoredAdamOptions>(archive, *this);
}

void FactoredAdam::load(torch::serialize::InputArchive& archive) {
  FactoredAdam loaded(std::vector<OptimizerParamGroup>{});
  for (const auto& group : param_groups_) loaded.param_groups_.push_back(group);
  torch::optim::serialize<FactoredAdamParamState, FactoredAdamOptions>(archive, loaded);
  for (const auto& group : loaded.param_groups_) {
    const auto& options = options_of(group);
    check_options(options);
    for (const auto& param : group.params()) {
      const auto state = loaded.state_.find(param.unsafeGetTensorImpl());
      if (state == loaded.state_.end()) continue;
      check_state(static_cast<const FactoredAdamParamState&>(*state->second), param, options);
    }
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    auto& options = static_cast<FactoredAdamOptions&>(param_groups_[i].options());
    options = options_of(loaded.param_groups_[i]);
  }
  state_ = std::move(loaded.state_);
}

}  // namespace moe_ext::optim
