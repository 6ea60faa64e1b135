// The operators whose kernels run on the CPU and on CUDA, and their host functions.
#pragma once

#include "balanced_gating.h"
#include "combine.h"
#include "cv_squared.h"
#include "dispatch.h"
#include "factored.h"
#include "gating.h"
#include "implement.h"
#include "importance.h"
#include "load.h"
#include "lstm_cell.h"
#include "topk_routing.h"

namespace moe_ext {

template <typename Device>
void register_operators(torch::Library& m) {
  implement<"noisy_topk_gating", &noisy_topk_gating<Device>>(m);
  implement<"_noisy_topk_gating_backward", &noisy_topk_gating_backward<Device>>(m);
  implement<"topk_routing", &topk_routing<Device>>(m);
  implement<"_topk_routing_backward", &topk_routing_backward<Device>>(m);
  implement<"load", &load<Device>>(m);
  implement<"_load_backward", &load_backward<Device>>(m);
  implement<"batchwise_topm", &batchwise_topm<Device>>(m);
  implement<"selected_softmax", &selected_softmax<Device>>(m);
  implement<"_selected_softmax_backward", &selected_softmax_backward<Device>>(m);
  implement<"importance", &importance<Device>>(m);
  implement<"importance_and_load", &importance_and_load<Device>>(m);
  implement<"weighted_cv_squared", &weighted_cv_squared<Device>>(m);
  implement<"_weighted_cv_squared_backward", &weighted_cv_squared_backward<Device>>(m);
  implement<"dispatch_plan", &dispatch_plan<Device>>(m);
  implement<"dispatch", &dispatch<Device>>(m);
  implement<"_dispatch_backward", &dispatch_backward<Device>>(m);
  implement<"combine", &combine<Device>>(m);
  implement<"_combine_backward", &combine_backward<Device>>(m);
  implement<"lstm_cell", &lstm_cell<Device>>(m);
  implement<"_lstm_cell_backward", &lstm_cell_backward<Device>>(m);
  implement<"factored_step_", &factored_step<Device>>(m);
}

}  // namespace moe_ext
