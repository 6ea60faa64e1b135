// Emulates csrc/cuda/mma.cuh on the CPU: cp.async, ldmatrix and mma.m16n8k16 as PTX defines them.
#pragma once

#include <cuda_pipeline.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "emulation.h"

namespace moe_ext::cuda {

inline void copy_async(void* shared, const void* from, bool inside) {
  __pipeline_memcpy_async(shared, from, 16, inside ? 0 : 16);
}

template <bool kTransposed>
void load_matrices(uint32_t (&matrices)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    emulation::fail("ldmatrix: the row must be aligned to 16 bytes");
  const auto rows = emulation::exchange(emulation::kAllLanes, row, "ldmatrix");
  const unsigned lane = threadIdx.x % emulation::kWarp;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned r = lane / 4, c = lane % 4 * 2 + i;
      const auto* from = static_cast<const uint16_t*>(rows[matrix * 8 + (kTransposed ? c : r)]);
      pair[i] = from[kTransposed ? r : c];
    }
    std::memcpy(&matrices[matrix], pair, sizeof(pair));
  }
}

template <typename scalar_t>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr bool kIsBFloat16 = std::is_same_v<scalar_t, c10::BFloat16>;
  using Registers = std::array<uint32_t, 6>;  // a, then b; each holds two numbers
  const auto all =
      emulation::exchange(emulation::kAllLanes, Registers{a[0], a[1], a[2], a[3], b0, b1},
                          kIsBFloat16 ? "mma.bf16" : "mma.f16");
  // The numbers at [k] of one row of the left matrix, or of one column of the right one.
  const auto numbers = [&](unsigned row, unsigned of_first_half, unsigned of_second_half) {
    std::array<double, 16> result;
    for (unsigned k = 0; k < 16; ++k) {
      const uint32_t pair = all[row * 4 + k % 8 / 2][k < 8 ? of_first_half : of_second_half];
      const auto bits = static_cast<uint16_t>(pair >> 16 * (k % 2));
      result[k] = static_cast<float>(scalar_t(bits, scalar_t::from_bits()));
    }
    return result;
  };
  const unsigned lane = threadIdx.x % emulation::kWarp;
  const std::array left{numbers(lane / 4, 0, 2), numbers(lane / 4, 1, 3)};
  const std::array right{numbers(lane % 4 * 2, 4, 5), numbers(lane % 4 * 2 + 1, 4, 5)};
  for (unsigned i = 0; i < 4; ++i) {
    double total = sum[i];
    for (unsigned k = 0; k < 16; ++k) total += left[i / 2][k] * right[i % 2][k];
    sum[i] = static_cast<float>(total);
  }
}

}  // namespace moe_ext::cuda
