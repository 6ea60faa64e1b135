// The backward pass of combine on the CPU.
#include "../kernels/combine.h"

#include <cmath>

#include "slots.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// dE_j = G_j dy and dG_j = <dy, E_j> for one assignment; reads each element once.
struct ScaleAndDot {
  template <typename scalar_t, typename acc_t>
  MOE_EXT_KERNEL void run(acc_t gate, const scalar_t* grad_y, const scalar_t* row, int64_t size,
                          scalar_t* grad_row, acc_t* grad_gate) {
    *grad_gate = sum_of_terms<acc_t>(
        size, [&](int64_t d, acc_t partial) __attribute__((always_inline)) {
          const acc_t grad = static_cast<acc_t>(grad_y[d]);
          grad_row[d] = static_cast<scalar_t>(gate * grad);
          return std::fma(grad, static_cast<acc_t>(row[d]), partial);
        });
  }
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void CombineBackward<scalar_t>::on_cpu() const {
  for_tokens(slots, 2 * width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
        const int64_t row = slots.row(slot) * width;
        vectorized<ScaleAndDot>(gates[slot], grad_y + t * width, rows + row, width, grad_rows + row,
                                grad_gates + slot);
      }
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(CombineBackward)

}  // namespace moe_ext
