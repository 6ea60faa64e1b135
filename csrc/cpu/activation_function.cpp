#include "activation_function.h"

#include "../math/activation.h"
#include "elementwise.h"
#include "vectorize.h"

namespace moe_ext::cpu {

template <typename scalar_t>
ActivationFunction<scalar_t>::ActivationFunction(std::string_view name,
                                                 std::span<const double> args) {
  math::with_activation(name, args, [&](auto function) {
    interleaved = function.kInterleaved;
    activate = [function](const scalar_t* z, Region region, int64_t width, scalar_t* out) {
      vectorized<Activate>(function, z, region, width, out);
    };
    activate_backward = [function](const scalar_t* z, const acc_t* sums, int64_t ld, Region region,
                                   int64_t width, acc_t* grad_z) {
      vectorized<ActivateBackward>(function, z, sums, ld, region, width, grad_z);
    };
  });
}

template struct ActivationFunction<float>;
template struct ActivationFunction<double>;
template struct ActivationFunction<c10::Half>;
template struct ActivationFunction<c10::BFloat16>;

}  // namespace moe_ext::cpu
