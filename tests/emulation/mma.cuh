// Emulates csrc/cuda/mma.cuh on the CPU: ldmatrix and mma.m16n8k16 as PTX defines them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "emulation.h"

namespace moe_ext::cuda {

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

// Returns the two numbers that each lane has in the register.
template <typename scalar_t>
std::array<std::array<float, 2>, emulation::kWarp> numbers(uint32_t mine) {
  constexpr bool kIsBFloat16 = std::is_same_v<scalar_t, c10::BFloat16>;
  const auto all =
      emulation::exchange(emulation::kAllLanes, mine, kIsBFloat16 ? "mma.bf16" : "mma.f16");
  std::array<std::array<float, 2>, emulation::kWarp> result;
  for (unsigned lane = 0; lane < emulation::kWarp; ++lane) {
    for (unsigned i = 0; i < 2; ++i) {
      const auto bits = static_cast<uint16_t>(all[lane] >> 16 * i);
      result[lane][i] = static_cast<float>(scalar_t(bits, scalar_t::from_bits()));
    }
  }
  return result;
}

template <typename scalar_t>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const std::array left{numbers<scalar_t>(a[0]), numbers<scalar_t>(a[1]), numbers<scalar_t>(a[2]),
                        numbers<scalar_t>(a[3])};
  const std::array right{numbers<scalar_t>(b0), numbers<scalar_t>(b1)};
  const unsigned lane = threadIdx.x % emulation::kWarp;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double total = sum[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned half = k / 8, of_four = k % 8 / 2, of_pair = k % 2;
      total += double(left[row / 8 + 2 * half][row % 8 * 4 + of_four][of_pair]) *
               right[half][column * 4 + of_four][of_pair];
    }
    sum[i] = static_cast<float>(total);
  }
}

}  // namespace moe_ext::cuda
