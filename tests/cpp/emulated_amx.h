// Emulates AMX on an x86-64 processor with AVX512-BF16: the tile instructions, the cpuid leaf that
// shows them, and the permission of the operating system. scripts/test_amx.sh compiles the kernels
// with `-include` of this header.
//
// The arithmetic of tdpbf16ps is that of Intel's manual (Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2): fused multiply-adds, round to nearest, subnormal numbers are 0.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace amx_instead {

struct Tile {
  uint32_t rows[16][16];
};

inline thread_local Tile tiles[8];

template <int tile>
inline void load(const void* from, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    std::memcpy(tiles[tile].rows[r], static_cast<const char*>(from) + r * stride, 64);
  }
}

template <int tile>
inline void store(void* to, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile].rows[r], 64);
  }
}

template <int tile>
inline void zero() {
  tiles[tile] = {};
}

inline float even(uint32_t pair) { return __builtin_bit_cast(float, pair << 16); }
inline float odd(uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000); }

template <int to, int a, int b>
__attribute__((target("arch=x86-64-v4"))) void multiply() {
  const unsigned control = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // FTZ, DAZ, round to nearest, no exceptions
  for (int m = 0; m < 16; ++m) {
    float sums[2][16] = {};
    for (int k = 0; k < 16; ++k) {
      const uint32_t pair = tiles[a].rows[m][k];
      for (int n = 0; n < 16; ++n) {
        sums[0][n] = std::fma(even(pair), even(tiles[b].rows[k][n]), sums[0][n]);
        sums[1][n] = std::fma(odd(pair), odd(tiles[b].rows[k][n]), sums[1][n]);
      }
    }
    for (int n = 0; n < 16; ++n) {
      uint32_t& element = tiles[to].rows[m][n];
      const float sum = __builtin_bit_cast(float, element) + (sums[0][n] + sums[1][n]);
      element = __builtin_bit_cast(uint32_t, sum);
    }
  }
  _mm_setcsr(control);
}

}  // namespace amx_instead

#include "amx_instead.h"
