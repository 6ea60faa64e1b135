// Importance(X) = sum_x G(x) (Eq. 6) and the exact load on the CPU.
#include "../kernels/importance.h"

#include "parallel.h"

namespace moe_ext {

template <typename scalar_t>
void Importance<scalar_t>::on_cpu() const {
  using acc_t = acc_type<scalar_t>;
  const int64_t bounds[] = {0, num_tokens};
  cpu::sum_over_tokens<acc_t>(bounds, /*num_groups=*/1, num_experts, k, importance,
                              [&](int64_t begin, int64_t end, acc_t* sums) {
                                for (int64_t slot = begin * k; slot < end * k; ++slot) {
                                  sums[expert_index[slot]] +=
                                      gates != nullptr ? static_cast<acc_t>(gates[slot]) : acc_t(1);
                                }
                              });
}
MOE_EXT_DEFINE_RUN_ON_CPU(Importance)

}  // namespace moe_ext
