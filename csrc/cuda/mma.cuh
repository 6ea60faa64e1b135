// The instructions of the tensor cores for half precision, and those that bring their operands to
// shared memory. A warp executes load_matrices and multiply_add: in one register, lane l has the
// elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of an 8 x 8 matrix or of its transpose.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace moe_ext::cuda {

// Starts to copy 16 bytes to shared memory; both addresses are aligned to 16 bytes. If not
// `inside`, writes zeros and does not read `from`.
__device__ __forceinline__ void copy_async(void* shared, const void* from, bool inside) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address),
               "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}

// Loads four 8 x 8 matrices from shared memory. Lane l passes the address of row l % 8 of matrix l
// / 8, aligned to 16 bytes.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
  }
}

// sum [16, 8] += a [16, 16] b [16, 8]. The operand a has four matrices: rows 0-7 and rows 8-15 of
// the first eight terms, then of the last eight. The operand b has two, transposed: the first eight
// terms and the last eight. A lane has two elements of rows 0-7 of the sum, then two of rows 8-15.
template <typename scalar_t>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<scalar_t, c10::Half>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace moe_ext::cuda
