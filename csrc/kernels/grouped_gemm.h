// The grouped GEMMs of the experts on CUDA, for which torch has none.
//
// The rows are ordered by expert, and only the device knows how many rows an expert has.
#pragma once

#include "experts.h"
#include "row_groups.h"

namespace moe_ext {

// out_r = a_r W_e for the rows r of expert e.
template <typename scalar_t>
struct GroupedGemm {
  const scalar_t* a;                      // [R, K]
  ExpertMatrices<const scalar_t> weight;  // [E, K, N]
  RowGroups experts;                      // with bounds
  int64_t k, n;
  scalar_t* out;  // [R, N]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(GroupedGemm)

// out_e = sum of a_r^T b_r over the rows r of expert e: exact zeros for an expert without rows.
template <typename scalar_t>
struct GroupedWeightGradient {
  const scalar_t* a;  // [R, M]
  const scalar_t* b;  // [R, N]
  RowGroups experts;  // with bounds
  int64_t m, n;
  scalar_t* out;  // [E, M, N]

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_RUNS_ON_CUDA(GroupedWeightGradient)

// Writes zeros for the experts without rows: torch's grouped GEMM leaves them unwritten on some
// devices.
struct ZerosOfUnusedExperts {
  RowGroups experts;
  int64_t num_bytes;  // of an expert, a multiple of 16
  void* out;          // [E, num_bytes], aligned to 16 bytes

  void on_cuda(const CudaStream& stream) const;
};
MOE_EXT_DECLARE_ON_CUDA(ZerosOfUnusedExperts)

}  // namespace moe_ext
