// Loops over the slots of tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../kernels/slots.h"
#include "parallel.h"

namespace moe_ext::cpu {

// Calls body(first_token, last_token) in parallel; a slot costs `work_per_slot` element accesses.
template <typename Body>
void for_tokens(const Slots& slots, int64_t work_per_slot, const Body& body) {
  const int64_t slots_per_token = slots.num_slots / std::max<int64_t>(1, slots.num_tokens) + 1;
  parallel_for(slots.num_tokens, slots_per_token * work_per_slot, body);
}

}  // namespace moe_ext::cpu
