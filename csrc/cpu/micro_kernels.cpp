#include "micro_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <type_traits>
#include <utility>

#include "pack.h"
#include "vectorize.h"

// Here, and only here, a product may be fused with the sum that it goes into.
#pragma GCC optimize("fp-contract=fast")

namespace moe_ext::cpu {
namespace {

template <typename acc_t, int kBytes>
struct Vector {
  typedef acc_t Aligned __attribute__((vector_size(kBytes)));
  typedef acc_t Unaligned __attribute__((vector_size(kBytes), aligned(sizeof(acc_t))));
};

// One product a lane.
template <typename acc_t, int kBytes>
struct Numbers {
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;
  MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) { sum += a * b; }
};

#if defined(__x86_64__)
// Two products and their sum a lane.
template <typename acc_t, int kBytes>
struct Bf16Pairs {
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;
  MOE_EXT_KERNEL void multiply_add(const acc_t& a, const Aligned& b, Aligned& sum) {
    typedef int32_t Words __attribute__((vector_size(64)));
    const Words words = Words{} + __builtin_bit_cast(int32_t, a);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(words));
  }
};
#endif

// Fetches what belongs to word q, chunks of kBytes.
template <int kBytes>
MOE_EXT_KERNEL void fetch(const Prefetch& prefetch, int64_t q) {
  const int64_t n = prefetch.first + (q >> prefetch.slowness);
  const char* chunk =
      prefetch.data + (n & prefetch.mask) * prefetch.stride + (n >> prefetch.shift) * kBytes;
  MOE_EXT_UNROLL for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(chunk + i, 0, 2);
}

// The sums stay in registers: kRows * kVectors of them.
template <typename acc_t, typename Arithmetic, int kBytes, int kPanelStride, int kRows,
          int kVectors>
MOE_EXT_KERNEL void multiply(int64_t num_words, const acc_t* __restrict a,
                             const acc_t* __restrict b, int64_t stride_b, const Out<acc_t>& out,
                             const Prefetch& prefetch, acc_t* __restrict packed) {
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, kBytes>::Unaligned;
  constexpr int kLanes = kBytes / sizeof(acc_t);
  Aligned sum[kRows][kVectors] = {};
  // Rows that are needed at the end.
  const acc_t* wanted = out.c;
  int64_t stride_wanted = out.stride;
  if (out.add != nullptr) {
    wanted = out.add;
    stride_wanted = out.stride_add;
  } else if (out.stream) {
    wanted = b;
    stride_wanted = 0;
  }
  const Prefetch later = prefetch;  // in registers
  const auto run = [&](auto packs) __attribute__((always_inline)) {
    const auto word = [&](int64_t q) __attribute__((always_inline)) {
      __builtin_prefetch(a + 16 * kPanelStride);
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(b + 4 * stride_b + v * kLanes);
      }
      Aligned column[kVectors];
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        column[v] = *reinterpret_cast<const Unaligned*>(b + v * kLanes);
        if constexpr (packs()) {
          *reinterpret_cast<Aligned*>(packed + (q * kMaxTileVectors + v) * kLanes) = column[v];
        }
      }
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          Arithmetic::multiply_add(a[r], column[v], sum[r][v]);
        }
      }
      a += kPanelStride;
      b += stride_b;
    };
    // Two words at a time: the second often fetches what the first does.
    int64_t q = 0;
    for (; q + 1 < num_words; q += 2) {
      fetch<kMaxTileVectors * kBytes>(later, q);
      word(q);
      if (later.slowness == 0) fetch<kMaxTileVectors * kBytes>(later, q + 1);
      // One line in 8 words: as many at once would keep a and b waiting.
      __builtin_prefetch(wanted + q / 16 * stride_wanted + (q & 8) * (64 / sizeof(acc_t)) / 8, 1);
      word(q + 1);
    }
    if (q < num_words) word(q);
  };
  packed != nullptr ? run(std::true_type()) : run(std::false_type());
  if (out.add != nullptr) {
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
        const acc_t* add = out.add + r * out.stride_add + v * kLanes;
        sum[r][v] = *reinterpret_cast<const Unaligned*>(add) + sum[r][v];
      }
    }
  }
#if defined(__x86_64__)
  if constexpr (kBytes == 64) {
    if (out.stream &&
        (reinterpret_cast<uintptr_t>(out.c) | out.stride * sizeof(acc_t)) % kBytes == 0) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
          auto& to = *reinterpret_cast<Aligned*>(out.c + r * out.stride + v * kLanes);
          asm("vmovntps %1, %0" : "=m"(to) : "v"(sum[r][v]));
        }
      }
      return;
    }
  }
#endif
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    MOE_EXT_UNROLL for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Unaligned*>(out.c + r * out.stride + v * kLanes) = sum[r][v];
    }
  }
}

// kDepth rows of B; A's words of them stay in the first cache level.
template <typename acc_t, typename Arithmetic, int kBytes, int kPanelStride, int kRows, int kDepth>
MOE_EXT_KERNEL void add_rows(const acc_t* __restrict a, const acc_t* __restrict b, int64_t stride_b,
                             int64_t num_columns, const acc_t* ahead, bool starts,
                             acc_t* __restrict c, int64_t stride_c) {
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, kBytes>::Unaligned;
  constexpr int kLanes = kBytes / sizeof(acc_t);
  int64_t left = num_columns;  // of the row to be fetched
  for (int64_t j = 0; j < num_columns; j += kLanes) {
    Aligned row[kDepth];
    MOE_EXT_UNROLL for (int q = 0; q < kDepth; ++q) {
      __builtin_prefetch(ahead + q * kLanes);
      row[q] = *reinterpret_cast<const Unaligned*>(b + q * stride_b + j);
    }
    ahead += kDepth * kLanes;
    left -= kDepth * kLanes;
    if (left <= 0) {
      left += num_columns;
      ahead += stride_b - num_columns;
    }
    MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
      auto& to = *reinterpret_cast<Unaligned*>(c + r * stride_c + j);
      Aligned sum = starts ? Aligned{} : Aligned(to);
      MOE_EXT_UNROLL for (int q = 0; q < kDepth; ++q) {
        Arithmetic::multiply_add(a[q * kPanelStride + r], row[q], sum);
      }
      to = sum;
    }
  }
}

// Memory likes few rows of B at a time; more of them spare reading and writing C.
template <typename acc_t, typename Arithmetic, int kBytes, int kPanelStride, int kRows>
MOE_EXT_KERNEL void multiply_few_rows(int64_t num_words, const acc_t* a, const acc_t* b,
                                      int64_t stride_b, int64_t num_columns, const acc_t* ahead,
                                      bool starts, acc_t* c, int64_t stride_c) {
  constexpr int kStores = kRows * 64 / kBytes;  // with a line of a row of B
  constexpr int kDepth = kStores <= 3 ? 1 : kStores <= 6 ? 2 : 4;
  int64_t q = 0;
  const auto add = [&](auto depth) __attribute__((always_inline)) {
    add_rows<acc_t, Arithmetic, kBytes, kPanelStride, kRows, depth()>(
        a + q * kPanelStride, b + q * stride_b, stride_b, num_columns, ahead + q * stride_b,
        starts && q == 0, c, stride_c);
    q += depth();
  };
  while (q + kDepth <= num_words) add(std::integral_constant<int, kDepth>());
  while (q < num_words) add(std::integral_constant<int, 1>());
}

// A vector's square of B at a time is transposed in registers.
template <typename acc_t, typename Arithmetic, int kBytes, int kRows>
MOE_EXT_KERNEL void multiply_few_rows_transposed(int64_t depth, const acc_t* a, int64_t stride_a,
                                                 const acc_t* b, int64_t stride_b,
                                                 const acc_t* ahead, bool starts, acc_t* c,
                                                 int64_t stride_c) {
  using Aligned = typename Vector<acc_t, kBytes>::Aligned;
  using Unaligned = typename Vector<acc_t, kBytes>::Unaligned;
  constexpr int kLanes = kBytes / sizeof(acc_t);
  Aligned sum[kRows] = {};
  for (int64_t p = 0; p < depth; p += kLanes, ahead += kLanes * kLanes) {
    Aligned square[kLanes];
    MOE_EXT_UNROLL for (int l = 0; l < kLanes; ++l) {
      __builtin_prefetch(ahead + l * kLanes, 0, 2);
      square[l] = *reinterpret_cast<const Unaligned*>(b + l * stride_b + p);
    }
    Words<kBytes, acc_t>::transpose(square);
    MOE_EXT_UNROLL for (int q = 0; q < kLanes; ++q) {
      MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
        Arithmetic::multiply_add(a[r * stride_a + p + q], square[q], sum[r]);
      }
    }
  }
  MOE_EXT_UNROLL for (int r = 0; r < kRows; ++r) {
    auto& to = *reinterpret_cast<Unaligned*>(c + r * stride_c);
    to = starts ? sum[r] : Aligned(to) + sum[r];
  }
}

#define MOE_EXT_INSTRUCTION_SET(Name, Arithmetic, kBytes_, kRows_, kPanelStride_, ...)             \
  template <typename acc_t>                                                                        \
  struct Name {                                                                                    \
    static constexpr int kBytes = kBytes_, kRows = kRows_, kPanelStride = kPanelStride_;           \
    template <int kTileRows, int kVectors>                                                         \
    static __attribute__((__VA_ARGS__)) void tile(int64_t num_words, const acc_t* a,               \
                                                  const acc_t* b, int64_t stride_b,                \
                                                  const Out<acc_t>& out, const Prefetch& prefetch, \
                                                  acc_t* packed) {                                 \
      multiply<acc_t, Arithmetic<acc_t, kBytes>, kBytes, kPanelStride, kTileRows, kVectors>(       \
          num_words, a, b, stride_b, out, prefetch, packed);                                       \
    }                                                                                              \
    template <int kFewRows>                                                                        \
    static __attribute__((__VA_ARGS__)) void few_rows(int64_t num_words, const acc_t* a,           \
                                                      const acc_t* b, int64_t stride_b,            \
                                                      int64_t num_columns, const acc_t* ahead,     \
                                                      bool starts, acc_t* c, int64_t stride_c) {   \
      multiply_few_rows<acc_t, Arithmetic<acc_t, kBytes>, kBytes, kPanelStride, kFewRows>(         \
          num_words, a, b, stride_b, num_columns, ahead, starts, c, stride_c);                     \
    }                                                                                              \
    template <int kFewRows>                                                                        \
    static __attribute__((__VA_ARGS__)) void few_rows_transposed(int64_t depth, const acc_t* a,    \
                                                                 int64_t stride_a, const acc_t* b, \
                                                                 int64_t stride_b,                 \
                                                                 const acc_t* ahead, bool starts,  \
                                                                 acc_t* c, int64_t stride_c) {     \
      multiply_few_rows_transposed<acc_t, Arithmetic<acc_t, kBytes>, kBytes, kFewRows>(            \
          depth, a, stride_a, b, stride_b, ahead, starts, c, stride_c);                            \
    }                                                                                              \
  }

// As many rows as leave registers for vectors of B and a word of A.
#if defined(__x86_64__)
MOE_EXT_INSTRUCTION_SET(Avx512, Numbers, 64, 14, 16, noinline,
                        target("arch=x86-64-v4,prefer-vector-width=512"));
MOE_EXT_INSTRUCTION_SET(Avx512Bf16, Bf16Pairs, 64, 14, 16, noinline,
                        target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512"));
MOE_EXT_INSTRUCTION_SET(Avx2, Numbers, 32, 6, 8, noinline, target("arch=x86-64-v3"));
#endif
MOE_EXT_INSTRUCTION_SET(Portable, Numbers, 16, 6, 8, noinline);

template <typename acc_t, typename Set, int kVectors, int... kRow>
constexpr void fill(Tile<acc_t>* tiles, std::integer_sequence<int, kRow...>) {
  ((tiles[kRow] = Set::template tile<kRow + 1, kVectors>), ...);
}

template <typename acc_t, typename Set, int... kRow>
constexpr void fill_few(MicroKernels<acc_t>& kernels, std::integer_sequence<int, kRow...>) {
  ((kernels.few_rows[kRow] = Set::template few_rows<kRow + 1>), ...);
  ((kernels.few_rows_transposed[kRow] = Set::template few_rows_transposed<kRow + 1>), ...);
}

template <typename acc_t, typename Set, bool kPairs = false>
constexpr MicroKernels<acc_t> kernels_of(const char* name) {
  MicroKernels<acc_t> kernels{
      name, kPairs, false, 1,       Set::kRows, Set::kPanelStride, Set::kBytes / sizeof(acc_t),
      {},   {},     {},    nullptr, nullptr};
  fill<acc_t, Set, 1>(kernels.tile[0], std::make_integer_sequence<int, Set::kRows>());
  fill<acc_t, Set, 2>(kernels.tile[1], std::make_integer_sequence<int, Set::kRows>());
  if constexpr (!kPairs) {
    fill_few<acc_t, Set>(kernels, std::make_integer_sequence<int, kMaxFewRows>());
  }
  return kernels;
}

#if defined(__x86_64__)
// AMX: C in four tile registers of 16 by 16, a row of A or two rows of B of 32 numbers in the
// others.
struct Amx {
  static constexpr int64_t kRows = 32, kSide = 16;

  // Of palette 1, every tile register 16 rows of 64 bytes.
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  static void start() {
    static const Configuration configuration;
    asm volatile("ldtilecfg %0" ::"m"(configuration));
  }

  static void stop() { asm volatile("tilerelease"); }

  template <int kTileRows, int kVectors>
  static __attribute__((noinline, target("arch=x86-64-v4,prefer-vector-width=512"))) void tile(
      int64_t num_words, const float* a, const float* b, int64_t stride_b, const Out<float>& out,
      const Prefetch& prefetch, float* /*packed*/) {
    constexpr bool kTwoRows = kTileRows > kSide, kTwoColumns = kVectors > 1;
    constexpr int64_t kBytesA = 4 * kSide;
    const int64_t bytes_b = 4 * stride_b;
    const int64_t step = int64_t{1} << prefetch.slowness;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t q = 0; q < num_words; q += kSide) {
      for (int64_t i = q; prefetch.stride != 0 && i < q + kSide; i += step) {
        fetch<4 * kMaxTileVectors * kSide>(prefetch, i);
      }
      _tile_loadd(4, a + q * kRows, kBytesA);
      _tile_loadd(6, b + q * stride_b, bytes_b);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTwoColumns) {
        _tile_loadd(7, b + q * stride_b + kSide, bytes_b);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTwoRows) {
        _tile_loadd(5, a + q * kRows + kSide * kSide, kBytesA);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
      }
    }
    alignas(64) float sum[kRows][kMaxTileVectors * kSide];
    constexpr int64_t kBytes = sizeof(sum[0]);
    _tile_stored(0, sum[0], kBytes);
    if constexpr (kTwoColumns) _tile_stored(1, sum[0] + kSide, kBytes);
    if constexpr (kTwoRows) _tile_stored(2, sum[kSide], kBytes);
    if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, sum[kSide] + kSide, kBytes);
    for (int r = 0; r < kTileRows; ++r) {
      float* row = out.c + r * out.stride;
      const float* add = out.add == nullptr ? nullptr : out.add + r * out.stride_add;
      for (int i = 0; i < kVectors * kSide; ++i) {
        row[i] = add == nullptr ? sum[r][i] : add[i] + sum[r][i];
      }
    }
  }

  static constexpr MicroKernels<float> kernels() {
    MicroKernels<float> kernels{"AMX", true, true, kSide, kRows, kRows,
                                kSide, {},   {},   {},    start, stop};
    fill<float, Amx, 1>(kernels.tile[0], std::make_integer_sequence<int, kRows>());
    fill<float, Amx, 2>(kernels.tile[1], std::make_integer_sequence<int, kRows>());
    return kernels;
  }
};
#endif

}  // namespace

template <typename scalar_t, typename acc_t>
const MicroKernels<acc_t>& micro_kernels() {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
    static constexpr auto kAmx = Amx::kernels();
    static constexpr auto kAvx512Bf16 = kernels_of<float, Avx512Bf16<float>, true>("AVX512-BF16");
    if (isa() == Isa::kAmx) return kAmx;
    if (isa() == Isa::kAvx512Bf16) return kAvx512Bf16;
  }
  static constexpr auto kAvx512 = kernels_of<acc_t, Avx512<acc_t>>("AVX-512");
  static constexpr auto kAvx2 = kernels_of<acc_t, Avx2<acc_t>>("AVX2");
  if (isa() >= Isa::kAvx512) return kAvx512;
  if (isa() == Isa::kAvx2) return kAvx2;
#endif
  static constexpr auto kPortable = kernels_of<acc_t, Portable<acc_t>>("portable");
  return kPortable;
}

template const MicroKernels<float>& micro_kernels<float, float>();
template const MicroKernels<double>& micro_kernels<double, double>();
template const MicroKernels<float>& micro_kernels<c10::Half, float>();
template const MicroKernels<float>& micro_kernels<c10::BFloat16, float>();

}  // namespace moe_ext::cpu
