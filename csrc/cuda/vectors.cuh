// Rows that are read in vectors of 16 bytes.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "launch.cuh"

namespace moe_ext::cuda {

// Several elements that are read or written together.
template <typename scalar_t, int kSize>
struct alignas(sizeof(scalar_t) * kSize) Vector {
  scalar_t values[kSize];
};

// Calls body(std::integral_constant<int, n>). n is the number of elements in 16 bytes, or 1 if a
// row is not aligned to 16 bytes.
template <typename scalar_t, typename Body>
void with_vector_size(int64_t width, std::initializer_list<const void*> data, const Body& body) {
  constexpr int kSize = 16 / sizeof(scalar_t);
  bool aligned = width % kSize == 0;
  for (const void* each : data) aligned &= reinterpret_cast<uintptr_t>(each) % 16 == 0;
  if (aligned) {
    body(std::integral_constant<int, kSize>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

}  // namespace moe_ext::cuda
