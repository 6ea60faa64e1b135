// Models the time of AMX on an x86-64 processor with AVX512-BF16. scripts/test_amx.sh --time
// compiles the kernels with `-include` of this header. The results of the kernels are wrong; only
// their time means something.
//
// Loads and stores of tiles access the same memory as on a processor with AMX, 64 bytes at a time.
// A product of two tiles takes 16 cycles, starts when both are loaded, and waits for the product
// before it: the throughput of tdpbf16ps on Sapphire Rapids (uops.info). The model leaves out the
// latency of 52 cycles, which kernels with four tiles of C hide, and the lower clock of AMX.
#pragma once

#include <cstdint>

// A tile is one vector, zmm16 to zmm23: the `or` of its rows. All products are one chain in zmm30.
#define MOE_EXT_TILE_TARGET __attribute__((always_inline, target("arch=x86-64-v4"))) inline
#define MOE_EXT_TILES \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm30", "cc", "memory"

namespace amx_instead {

template <int tile>
MOE_EXT_TILE_TARGET void zero() {}

template <int tile>
MOE_EXT_TILE_TARGET void load(const void* from, int64_t stride) {
  asm volatile(
      "vmovdqu64 (%0), %%zmm%c2\n"
      ".rept 15\n"
      "add %1, %0\n"
      "vporq (%0), %%zmm%c2, %%zmm%c2\n"
      ".endr\n"
      : "+r"(from)
      : "r"(stride), "i"(16 + tile)
      : MOE_EXT_TILES);
}

template <int tile>
MOE_EXT_TILE_TARGET void store(void* to, int64_t stride) {
  asm volatile(
      "vmovdqu64 %%zmm30, (%0)\n"
      ".rept 15\n"
      "add %1, %0\n"
      "vmovdqu64 %%zmm30, (%0)\n"
      ".endr\n"
      : "+r"(to)
      : "r"(stride)
      : MOE_EXT_TILES);
}

// 5 + 5 + 5 + 1 cycles.
template <int to, int a, int b>
MOE_EXT_TILE_TARGET void multiply() {
  asm volatile(
      "vpmaddwd %%zmm%c0, %%zmm30, %%zmm30\n"
      "vpmaddwd %%zmm%c1, %%zmm30, %%zmm30\n"
      "vpmaddwd %%zmm30, %%zmm30, %%zmm30\n"
      "vpaddd %%zmm30, %%zmm30, %%zmm30\n"
      :
      : "i"(16 + a), "i"(16 + b)
      : MOE_EXT_TILES);
}

}  // namespace amx_instead

#include "amx_instead.h"
