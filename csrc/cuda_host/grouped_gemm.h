// The GEMMs of the experts on CUDA: each expert's matrix with its rows.
//
// Experts of equal size use torch's batched GEMM. In bfloat16, torch's grouped GEMM computes the
// others on the devices that have it, for up to 1023 experts. All others are GroupedGemm and
// GroupedWeightGradient.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/bmm.h>

#include <utility>

#include "../experts.h"
#include "../kernels/grouped_gemm.h"
#include "../kernels/machine.h"

namespace moe_ext {

// Rows that are ordered by expert. All tensors are contiguous, but weights may also be transposed
// (see experts.h).
class GroupedGemms {
 public:
  // offsets [E + 1] on the device; undefined if all experts have R / E rows.
  GroupedGemms(Tensor offsets, int64_t num_rows, int64_t num_experts)
      : offsets_(std::move(offsets)), num_rows_(num_rows), num_experts_(num_experts) {}

  RowGroups experts() const {
    return {
        .bounds = data_of<int64_t>(offsets_), .num_groups = num_experts_, .num_rows = num_rows_};
  }

  // Returns a [R, K] times weight [E, K, N]: [R, N].
  Tensor times(const Tensor& a, const Tensor& weight) const {
    const int64_t n = weight.size(2);
    if (!offsets_.defined()) return at::bmm(by_expert(a), weight).view({num_rows_, n});
    if (torch_takes(a, weight)) return at::_grouped_mm(a, weight, ends());
    Tensor out = at::empty({num_rows_, n}, a.options());
    with_type(a, [&]<typename scalar_t>() {
      Cuda::run(GroupedGemm<scalar_t>{.a = a.const_data_ptr<scalar_t>(),
                                      .weight = {.data = weight.const_data_ptr<scalar_t>(),
                                                 .transposed = is_transposed(weight)},
                                      .bias = nullptr,
                                      .experts = experts(),
                                      .k = weight.size(1),
                                      .n = n,
                                      .out = out.mutable_data_ptr<scalar_t>()});
    });
    return out;
  }

  // Returns the transposed a [R, M] times b [R, N] for each expert: [E, M, N].
  Tensor weight_gradient(const Tensor& a, const Tensor& b) const {
    const int64_t m = a.size(1), n = b.size(1);
    if (!offsets_.defined()) return at::bmm(by_expert(a).transpose(1, 2), by_expert(b));
    if (torch_takes(a, b)) {
      Tensor out = at::_grouped_mm(a.t(), b, ends());
      Cuda::run(ZerosOfUnusedExperts{.experts = experts(),
                                     .num_bytes = m * n * out.element_size(),
                                     .out = out.mutable_data_ptr()});
      return out;
    }
    Tensor out = at::empty({num_experts_, m, n}, a.options());
    with_type(a, [&]<typename scalar_t>() {
      Cuda::run(GroupedWeightGradient<scalar_t>{.a = a.const_data_ptr<scalar_t>(),
                                                .b = b.const_data_ptr<scalar_t>(),
                                                .experts = experts(),
                                                .m = m,
                                                .n = n,
                                                .out = out.mutable_data_ptr<scalar_t>()});
    });
    return out;
  }

 private:
  Tensor by_expert(const Tensor& rows) const {
    return rows.view({num_experts_, num_rows_ / num_experts_, rows.size(1)});
  }

  // offsets[1:] as int32 for torch's grouped GEMM, computed at the first use.
  const Tensor& ends() const {
    if (!ends_.defined()) ends_ = offsets_.slice(0, 1).to(at::kInt);
    return ends_;
  }

  // Whether torch's grouped GEMM takes these operands: bfloat16, with lines aligned to 16 bytes. A
  // single row or matrix is contiguous with any stride, but torch checks the stride.
  bool torch_takes(const Tensor& one, const Tensor& other) const {
    constexpr int64_t kMostExperts = 1023, kMostRows = INT32_MAX, kAligned = 8;
    const auto is_aligned = [](const Tensor& operand) {
      bool aligned = reinterpret_cast<uintptr_t>(operand.const_data_ptr()) % 16 == 0;
      for (int64_t d = 1; d < operand.dim(); ++d) aligned &= operand.size(d) % kAligned == 0;
      return aligned && (operand.dim() == 2 ? operand.stride(0) == operand.size(1)
                                            : operand.stride(0) % kAligned == 0);
    };
    if (one.scalar_type() != at::kBFloat16 || !is_aligned(one) || !is_aligned(other) ||
        one.numel() == 0 || other.numel() == 0 || num_rows_ > kMostRows ||
        num_experts_ > kMostExperts) {
      return false;
    }
    const int capability = cuda::compute_capability();
    return capability == 9 || capability == 10;
  }

  at::NoTF32Guard no_tf32_;
  Tensor offsets_;
  mutable Tensor ends_;
  int64_t num_rows_, num_experts_;
};

}  // namespace moe_ext
