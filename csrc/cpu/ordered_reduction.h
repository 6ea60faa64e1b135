// The gradients of the experts' parameters, summed over the blocks of an expert in a fixed order.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "block_scheduler.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "gemm/gemm.h"
#include "vectorize.h"
#include "workspace.h"

namespace moe_ext::cpu {

// Adds the contributions of an expert's blocks to its gradients, in the order of the blocks. The
// sums are bitwise identical for any number of threads.
template <typename scalar_t>
class OrderedReduction {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  // Writes the sums to `gradients`. Each tensor has the experts in sequence in memory, or is
  // empty if it is not needed.
  OrderedReduction(at::TensorList gradients, int64_t num_experts, int64_t num_split_experts,
                   const at::TensorOptions& acc_options) {
    for (const at::Tensor& each : gradients) {
      const int64_t size = each.numel() / std::max<int64_t>(1, num_experts);
      largest_ = std::max(largest_, size);
      parameters_.push_back(
          {.data = each.mutable_data_ptr<scalar_t>(), .size = size, .offset = size_});
      size_ += whole_lines(size);
    }
    // Gradients that do not fit into the caches are not read again soon, so they bypass the caches.
    constexpr int64_t kLarge = 8 << 20;
    if (size_ * num_experts * static_cast<int64_t>(sizeof(acc_t)) > kLarge) write_ = Write::kStream;
    is_split_ = num_split_experts > 0;
    if (!kSame) sums_ = empty_rows({num_split_experts, size_}, acc_options);
    num_added_ = std::vector<std::atomic<int>>(num_split_experts * parameters_.size());
  }

  // Returns whether gradient `index` has elements to compute.
  bool needs(int64_t index) const { return parameters_[index].size > 0; }

  // The number of workspace elements that `add` needs.
  int64_t space_size() const { return is_split_ ? largest_ : 0; }

  // Adds a block's contribution to gradient `index`. compute(target, write) computes the
  // contribution and writes it to `target`: the gradient itself in scalar_t, or a sum in acc_t.
  template <typename Compute>
  void add(const Block& block, int64_t index, acc_t* space, const Compute& compute) const {
    const auto& parameter = parameters_[index];
    scalar_t* whole = parameter.data + block.expert * parameter.size;
    if (block.split_index < 0) return compute(whole, write_);
    acc_t* sum;
    if constexpr (kSame) {
      sum = whole;
    } else {
      sum = sums_.mutable_data_ptr<acc_t>() + block.split_index * size_ + parameter.offset;
    }
    if (block.part == 0) {
      compute(sum, write_);
    } else {
      compute(space, Write::kReplace);
    }
    auto& num_added = num_added_[block.split_index * parameters_.size() + index];
    for (int added; (added = num_added.load()) != block.part;) num_added.wait(added);
    if (block.part > 0) {
      vectorized<Add>(static_cast<const acc_t*>(space), parameter.size, sum);
    }
    num_added.store(block.part + 1);
    num_added.notify_all();
    if (!kSame && block.last) {
      vectorized<Convert>(static_cast<const acc_t*>(sum), parameter.size, whole);
    }
  }

  // Writes the gradients of an expert without rows.
  void write_zeros(const Block& block) const {
    for (const auto& each : parameters_) {
      std::fill_n(each.data + block.expert * each.size, each.size, scalar_t(0));
    }
  }

 private:
  static constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;

  // The gradient of one parameter.
  struct Parameter {
    scalar_t* data;
    int64_t size;    // elements of one expert
    int64_t offset;  // in an expert's row of sums_
  };

  std::vector<Parameter> parameters_;
  int64_t size_ = 0, largest_ = 0;  // of one expert: all gradients; the largest one
  bool is_split_ = false;           // whether an expert has several blocks
  at::Tensor sums_;                 // [num_split_experts, size_], if acc_t is wider than scalar_t
  // The number of blocks that are already in each gradient of each split expert.
  mutable std::vector<std::atomic<int>> num_added_;
  Write write_ = Write::kReplace;
};

}  // namespace moe_ext::cpu
