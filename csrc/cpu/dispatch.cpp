// The dispatch plan (a stable counting sort of the slots by expert), and the gather of the rows.
#include "../dispatch.h"

#include <ATen/ceil_div.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "../implement.h"
#include "empty_rows.h"
#include "parallel.h"
#include "slots.h"

namespace moe_ext::cpu {
namespace {

// Slot t * k + j is the j-th expert of token t. Slots are counted and placed in blocks, each with
// its own histogram. A stable sort has only one result, so it does not depend on the number of
// blocks.
std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_plan_cpu(const Tensor& expert_index,
                                                             int64_t num_experts) {
  check_dispatch_plan(expert_index, num_experts);
  const Tensor chosen = contiguous_index(expert_index);
  check_index_range("dispatch_plan", "expert_index", chosen, num_experts);
  const auto* chosen_data = chosen.const_data_ptr<int64_t>();
  const int64_t num_rows = chosen.numel();
  const auto plan = dispatch_plan_outputs(empty, expert_index, num_experts);
  const auto& [permutation, inverse, tokens_per_expert, offsets] = plan;

  const int64_t worth = num_rows / std::max<int64_t>(65536, 4 * num_experts);
  const int64_t num_blocks =
      std::clamp<int64_t>(worth, 1, static_cast<int64_t>(torch::stable::get_num_threads()));
  const int64_t block = at::ceil_div(num_rows, num_blocks);
  std::vector<int64_t> next(num_blocks * num_experts, 0);
  const auto for_each_block = [&](auto body) {
    parallel_for(num_blocks, block, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        body(next.data() + b * num_experts, b * block, std::min(num_rows, (b + 1) * block));
      }
    });
  };

  for_each_block([&](int64_t* count, int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) ++count[chosen_data[slot]];
  });

  // Converts the counts to the first row of each (expert, block).
  auto* tokens_data = tokens_per_expert.mutable_data_ptr<int64_t>();
  auto* offsets_data = offsets.mutable_data_ptr<int64_t>();
  int64_t row = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    offsets_data[expert] = row;
    for (int64_t b = 0; b < num_blocks; ++b) {
      row += std::exchange(next[b * num_experts + expert], row);
    }
    tokens_data[expert] = row - offsets_data[expert];
  }
  offsets_data[num_experts] = row;

  auto* permutation_data = permutation.mutable_data_ptr<int64_t>();
  auto* inverse_data = inverse.mutable_data_ptr<int64_t>();
  for_each_block([&](int64_t* first_free, int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t placed = first_free[chosen_data[slot]]++;
      permutation_data[placed] = slot;
      inverse_data[slot] = placed;
    }
  });
  return plan;
}

Tensor dispatch_cpu(const Tensor& x, const Tensor& inverse, const OptionalTensor& token_offsets) {
  check_dispatch(x, inverse, token_offsets);
  const Tensor source = x.contiguous();
  const Slots slots("dispatch", inverse, token_offsets);
  Tensor rows = dispatch_output(empty, x, inverse);
  if (rows.numel() == 0) return rows;  // memcpy must not get a null pointer
  const int64_t bytes = x.size(1) * x.element_size();
  const auto* source_data = static_cast<const char*>(source.const_data_ptr());
  auto* rows_data = static_cast<char*>(rows.mutable_data_ptr());
  // Iterates over tokens, not rows: a token is read from memory once, then from the cache.
  slots.for_tokens(x.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t slot = slots.begin(t); slot < slots.end(t); ++slot) {
        std::memcpy(rows_data + slots.row(slot) * bytes, source_data + t * bytes, bytes);
      }
    }
  });
  return rows;
}

// dx_t = sum of drows over the slots of t, in order.
Tensor dispatch_backward_cpu(const Tensor& grad_rows, const Tensor& inverse,
                             const OptionalTensor& token_offsets) {
  check_dispatch_backward(grad_rows, inverse, token_offsets);
  const Slots slots("_dispatch_backward", inverse, token_offsets);
  Tensor grad_x = dispatch_gradient(empty, grad_rows, inverse, token_offsets);
  sum_of_rows(grad_rows.contiguous(), slots, /*weights=*/Tensor(), grad_x);
  return grad_x;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"dispatch_plan", &moe_ext::cpu::dispatch_plan_cpu>(m);
  moe_ext::implement<"dispatch", &moe_ext::cpu::dispatch_cpu>(m);
  moe_ext::implement<"_dispatch_backward", &moe_ext::cpu::dispatch_backward_cpu>(m);
}
