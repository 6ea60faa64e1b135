// Computes a mixture of experts (Eq. 1) with three operators, forward and backward.
//
//     prefix=$(python -m moe_ext.info --cmake-prefix)
//     cmake -S examples/cpp -B build/examples -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
//     cmake --build build/examples --target ops
//     build/examples/ops
//
// It prints, with torch 2.15:
//
//     [1000, 64], busiest expert: 153
#include <moe_ext/ops.h>
#include <torch/torch.h>

#include <iostream>

namespace ops = moe_ext::ops;

int main() {
  torch::manual_seed(0);
  auto x = torch::randn({1000, 64});                      // 1,000 tokens
  auto w_gate = torch::randn({64, 16}).requires_grad_();  // 16 experts
  auto w1 = torch::randn({16, 64, 256}).div_(8).requires_grad_();
  auto w2 = torch::randn({16, 256, 64}).div_(16).requires_grad_();
  auto top = ops::noisy_topk_gating(x.matmul(w_gate), {}, {}, /*k=*/2);  // without noise
  auto plan = ops::dispatch_plan(top.expert_index, /*num_experts=*/16);
  auto y = ops::experts(x, {w1, w2}, {}, "relu",
                        {.offsets = plan.offsets, .inverse = plan.inverse, .gates = top.gates});
  y.square().mean().backward();  // gradients of w_gate, w1 and w2
  std::cout << y.sizes() << ", busiest expert: " << plan.tokens_per_expert.max().item() << '\n';
  return std::cout.flush() ? 0 : 1;  // stdout may be closed or full
}
