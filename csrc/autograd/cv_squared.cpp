#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include "function.h"

namespace moe_ext::autograd {
namespace {

// dCV^2/dv_i = 2 (u_i - CV^2) / (n mean), where u_i = (v_i - mean) / mean. It is 0 if all v are 0.
struct CvSquared : torch::autograd::Function<CvSquared> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& values) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_operator<Tensor(const Tensor&)>("moe_ext::cv_squared");
    Tensor result = op.call(values);
    ctx->save_for_backward({values, result});
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& values = saved[0];
    const Tensor& cv_squared = saved[1];
    // The rounding of torch's mean depends on the strides.
    const Tensor wide = values.contiguous().to(cv_squared.scalar_type());
    const Tensor mean = wide.mean();
    const Tensor positive = at::where(mean > 0, mean, 1);
    const Tensor relative = (wide - mean) / positive - cv_squared;
    const Tensor scale = grads[0] * 2 / (positive * at::Scalar(values.sym_numel()));
    return {(relative * scale).to(values.scalar_type())};
  }
};

Tensor cv_squared(const Tensor& values) { return CvSquared::apply(values); }

}  // namespace
}  // namespace moe_ext::autograd

TORCH_LIBRARY_IMPL(moe_ext, Autograd, m) { m.impl("cv_squared", &moe_ext::autograd::cv_squared); }
