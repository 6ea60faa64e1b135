// Noisy top-k gating, Eqs. 3 and 4, and the gradient of the softmax over the kept logits.
#pragma once

#include "elementary.h"

namespace moe_ext::math {

// Eq. 4: H = clean + noise * stddev
template <typename T>
MOE_EXT_INLINE T noisy_logit(T clean, T noise, T stddev) {
  return std::fma(noise, stddev, clean);
}

// Eq. 3: the numerator of the softmax over the kept logits.
template <typename T>
MOE_EXT_INLINE T unnormalized_gate(T noisy, T largest_noisy) {
  return exp(noisy - largest_noisy);
}

// dL/dH_a = g_a (v_a - sum_b g_b v_b), with v = dL/dg; b runs over the kept experts.
template <typename T>
MOE_EXT_INLINE T noisy_logit_gradient(T gate, T grad_gate, T mean_grad_gate) {
  return gate * (grad_gate - mean_grad_gate);
}

}  // namespace moe_ext::math
