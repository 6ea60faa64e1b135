// The GEMMs of the experts on CUDA: each expert's matrix with its rows.
//
// Experts of equal size use torch's batched GEMM. In half types, torch's grouped GEMM computes the
// others where it does not wait for the host, for up to 1023 experts, or QuACK's if it is chosen.
// All others are GroupedGemm and GroupedWeightGradient.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "../experts.h"
#include "../kernels/grouped_gemm.h"
#include "../kernels/machine.h"
#include "quack.h"
#include "torch_build.h"

namespace moe_ext {

// The library of the grouped GEMMs of half types, where it takes them.
enum class GroupedMM { kNone, kTorch, kQuack };

// Returns the library that MOE_EXT_GROUPED_MM names in the environment.
inline GroupedMM chosen_grouped_mm() {
  static const GroupedMM choice = [] {
    const char* const text = std::getenv("MOE_EXT_GROUPED_MM");
    const std::string_view value = text == nullptr ? "1" : text;
    TORCH_CHECK_VALUE(value == "0" || value == "1" || value == "quack",
                      "MOE_EXT_GROUPED_MM must be 0, 1 or quack, got ", value);
    if (value == "quack") return GroupedMM::kQuack;
    return value == "1" ? GroupedMM::kTorch : GroupedMM::kNone;
  }();
  return choice;
}

// Whether torch's grouped GEMM has a kernel for a type. For float16, it is that of cuBLASLt, in
// torch 2.14 or later built with CUDA 13.3 or later. Without a kernel, torch copies the offsets to
// the host.
inline bool has_grouped_mm(at::ScalarType type) {
  const TorchBuild torch = torch_build();
  return type == at::kBFloat16 ||
         (type == at::kHalf && torch.release >= 2014 && torch.cuda >= 13030);
}

// Whether torch's GEMMs would round float32 to TF32: at::NoTF32Guard does not reach cuBLASLt.
inline bool rounds_to_tf32(at::ScalarType type) {
  at::Context& context = at::globalContext();
  return type == at::kFloat && context.blasPreferredBackend() == at::BlasBackend::Cublaslt &&
         context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

// Rows that are ordered by expert. All tensors are contiguous, but weights may also be transposed
// (see experts.h).
class GroupedGemms {
 public:
  // The rows have the type and the device of x. offsets [E + 1] are undefined if all experts have
  // R / E rows.
  GroupedGemms(const Tensor& x, Tensor offsets, int64_t num_rows, int64_t num_experts)
      : offsets_(std::move(offsets)), num_rows_(num_rows), num_experts_(num_experts) {
    if (offsets_.defined() || !rounds_to_tf32(x.scalar_type())) return;
    offsets_ = at::arange(num_experts + 1, x.options().dtype(at::kLong));  // for our own GEMM
    offsets_.mul_(num_rows / num_experts);
  }

  RowGroups experts() const {
    return {
        .bounds = data_of<int64_t>(offsets_), .num_groups = num_experts_, .num_rows = num_rows_};
  }

  // Returns a [R, K] times weight [E, K, N]: [R, N].
  Tensor times(const Tensor& a, const Tensor& weight) const {
    const int64_t n = weight.size(2);
    if (!offsets_.defined()) return at::bmm(by_expert(a), weight).view({num_rows_, n});
    const GroupedMM library = library_for(a, weight);
    if (library == GroupedMM::kTorch) return at::_grouped_mm(a, weight, bounds());
    Tensor out = at::empty({num_rows_, n}, a.options());
    if (library == GroupedMM::kQuack) {
      quack_gemm(a, weight, out, "cu_seqlens_m", bounds());
      return out;
    }
    with_type(a, [&]<typename scalar_t>() {
      Cuda::run(GroupedGemm<scalar_t>{.a = a.const_data_ptr<scalar_t>(),
                                      .weight = {.data = weight.const_data_ptr<scalar_t>(),
                                                 .transposed = is_transposed(weight)},
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
    const GroupedMM library = library_for(a, b);
    Tensor out = library == GroupedMM::kTorch ? at::_grouped_mm(a.t(), b, bounds())
                                              : at::empty({num_experts_, m, n}, a.options());
    if (library == GroupedMM::kQuack) quack_gemm(a.t(), b, out, "cu_seqlens_k", bounds());
    if (library != GroupedMM::kNone) {
      Cuda::run(ZerosOfUnusedExperts{.experts = experts(),
                                     .num_bytes = m * n * out.element_size(),
                                     .out = out.mutable_data_ptr()});
      return out;
    }
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

  // The offsets as int32, computed at the first use. torch wants them without the first one.
  const Tensor& bounds() const {
    if (!bounds_.defined()) {
      bounds_ = offsets_.slice(0, chosen_grouped_mm() == GroupedMM::kTorch ? 1 : 0).to(at::kInt);
    }
    return bounds_;
  }

  // Returns the library that takes these operands, with lines aligned to 16 bytes. A single row or
  // matrix is contiguous with any stride, but torch checks the stride.
  GroupedMM library_for(const Tensor& one, const Tensor& other) const {
    constexpr int64_t kMostRows = INT32_MAX, kMostExpertsOfTorch = 1023, kAligned = 8;
    const GroupedMM library = chosen_grouped_mm();
    const auto is_aligned = [](const Tensor& operand) {
      bool aligned = reinterpret_cast<uintptr_t>(operand.const_data_ptr()) % 16 == 0;
      for (int64_t d = 1; d < operand.dim(); ++d) aligned &= operand.size(d) % kAligned == 0;
      return aligned && (operand.dim() == 2 ? operand.stride(0) == operand.size(1)
                                            : operand.stride(0) % kAligned == 0);
    };
    if (library == GroupedMM::kNone || one.element_size() != 2 || !is_aligned(one) ||
        !is_aligned(other) || one.numel() == 0 || other.numel() == 0 || num_rows_ > kMostRows) {
      return GroupedMM::kNone;
    }
    const int capability = cuda::compute_capability();
    const bool takes = library == GroupedMM::kQuack ? capability >= 9
                                                    : has_grouped_mm(one.scalar_type()) &&
                                                          num_experts_ <= kMostExpertsOfTorch &&
                                                          (capability == 9 || capability == 10);
    return takes ? library : GroupedMM::kNone;
  }

  at::NoTF32Guard no_tf32_;
  Tensor offsets_;
  mutable Tensor bounds_;
  int64_t num_rows_, num_experts_;
};

}  // namespace moe_ext
