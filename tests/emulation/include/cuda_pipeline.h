#pragma once

#include "emulation.h"

// Copies immediately, or when the thread waits for the copy. The choice is random.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t size, size_t num_zeros = 0) {
  const auto is_aligned = [&](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % size == 0;
  };
  if ((size != 4 && size != 8 && size != 16) || num_zeros > size || !is_aligned(to) ||
      !is_aligned(from)) {
    emulation::fail("cp.async: size and alignment must be 4, 8 or 16 bytes");
  }
  const emulation::Copy copy{to, from, size - num_zeros, num_zeros};
  if (emulation::machine().random() % 2 == 0) return copy.run();
  emulation::machine().thread().copies.back().push_back(copy);
}

inline void __pipeline_commit() { emulation::machine().thread().copies.emplace_back(); }

inline void __pipeline_wait_prior(size_t num_left) {
  auto& copies = emulation::machine().thread().copies;
  while (copies.size() - 1 > num_left) {
    for (const emulation::Copy& copy : copies.front()) copy.run();
    copies.erase(copies.begin());
  }
}
