// FactoredAdam, an optimizer whose state is small enough for thousands of experts (Appendix D).
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <utility>
#include <vector>

#include "export.h"

namespace moe_ext::optim {

// The options of FactoredAdam; each parameter group may have its own.
struct MOE_EXT_API FactoredAdamOptions
    : torch::optim::OptimizerCloneableOptions<FactoredAdamOptions> {
  explicit FactoredAdamOptions(double lr = 1e-3);

  // The learning rate.
  TORCH_ARG(double, lr) = 1e-3;
  // Decay of the second moment.
  TORCH_ARG(double, beta2) = 0.999;
  // Added to sqrt(V).
  TORCH_ARG(double, eps) = 1e-8;
  // Whether to divide g by (sqrt(row) + eps) * (sqrt(column) + eps) / mean(sqrt(column) + eps)
  // instead of sqrt(V) + eps, with bias-corrected row and column.
  TORCH_ARG(bool, mean_of_roots) = false;
  // Whether to factor the second moment; false stores it in full.
  TORCH_ARG(bool, factored) = true;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

// The state of one parameter. second_moment is defined instead of row and column if the parameter
// has fewer than two dimensions or its group has factored(false).
struct MOE_EXT_API FactoredAdamParamState
    : torch::optim::OptimizerCloneableParamState<FactoredAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, row);
  TORCH_ARG(torch::Tensor, column);
  TORCH_ARG(torch::Tensor, second_moment);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Adam with beta1 = 0 and a factored second moment (Appendix D). The update of a weight matrix
// [R, C] with gradient g in step t is:
//
//   row    <- beta2 * row    + (1 - beta2) * mean over the columns of g^2
//   column <- beta2 * column + (1 - beta2) * mean over the rows of g^2
//   V = row column^T / mean(row) / (1 - beta2^t)
//   weight <- weight - lr * g / (sqrt(V) + eps)
//
// The last two dimensions of a parameter form the matrix: expert weights [E, D, F] have row [E, D]
// and column [E, F]. The second moments of half-precision weights are float32.
//
// The constructors, add_param_group and step throw c10::ValueError if an option is out of range,
// c10::TypeError if a parameter is complex or a gradient is sparse. No parameter is then changed.
// load throws c10::Error, and changes nothing, if the file does not fit the parameters.
class MOE_EXT_API FactoredAdam : public torch::optim::Optimizer {
 public:
  explicit FactoredAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        const FactoredAdamOptions& defaults = FactoredAdamOptions());
  explicit FactoredAdam(std::vector<torch::Tensor> params,
                        const FactoredAdamOptions& defaults = FactoredAdamOptions());

  // Adds parameters. If the group has options, they replace all defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace moe_ext::optim
