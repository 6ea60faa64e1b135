// The balancing losses (Section 4, Appendix A) and the threshold loss (Appendix F).
#include <moe_ext/nn.h>

#include "checks.h"
#include "logits.h"

namespace moe_ext::nn {
namespace {

// Computes weight * CV(values)^2; skips the computation if the weight is 0.
Tensor weighted(const Tensor& values, double weight) {
  if (weight == 0) return at::zeros({}, values.options().dtype(wide_type(values)));
  return cv_squared(values) * weight;
}

}  // namespace

Tensor cv_squared(const Tensor& values) {
  TORCH_CHECK_VALUE(values.dim() == 1 && values.size(0) > 0,
                    "cv_squared: values must have shape [E], E > 0, got ",
                    tuple_of(values.sizes()));
  const auto wide = widened(values);
  const auto mean = wide.mean();
  // No epsilon is needed: non-negative values have mean 0 only if all are 0.
  const auto deviation = (wide - mean) / at::where(mean > 0, mean, 1);
  return deviation.square().mean();
}

Tensor importance_loss(const Tensor& importance, double weight) {
  return weighted(importance, weight);
}

Tensor load_loss(const Tensor& load, double weight) { return weighted(load, weight); }

Tensor batchwise_loss(const Tensor& scores, const Tensor& threshold, const Tensor& mask) {
  auto shape = scores.sizes().vec();
  if (shape.size() >= 2) shape.erase(shape.end() - 2);
  require_shape("batchwise_loss", "threshold", threshold, shape);
  require_shape("batchwise_loss", "mask", mask, scores.sizes());
  const auto excess = scores - threshold.unsqueeze(-2);
  const auto type = excess.scalar_type();
  return (((excess > 0).to(type) - mask.to(type)) * excess).sum();
}

}  // namespace moe_ext::nn
