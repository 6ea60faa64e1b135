#include "integer.h"

#include <ATen/ceil_div.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "../vectorize.h"

#define MOE_EXT_TARGET
#include "integer_loops.h"

namespace moe_ext::cpu {
namespace {

struct PortableBytes {
  static constexpr int kBytes = 16;

  template <typename Bits, typename Integers>
  MOE_EXT_KERNEL void dot(const Bits& codes, const int8_t* numbers, Integers& sum) {
    for (int byte = 0; byte < 4; ++byte) {
      sum += (Integers)(codes >> 8 * byte & 0xff) * int32_t{numbers[byte]};
    }
  }

  template <typename Bits>
  MOE_EXT_KERNEL void look_up(const uint8_t* table, Bits& codes) {
    uint8_t bytes[kBytes];
    std::memcpy(bytes, &codes, kBytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    std::memcpy(&codes, bytes, kBytes);
  }
};

IntegerKernel kernel_of(const PackedFormat& format) {
#if defined(__x86_64__)
  if (isa() >= Isa::kAvx512 && __builtin_cpu_supports("avx512vnni")) {
    return avx512_vnni_integer_kernel(format);
  }
  if (isa() >= Isa::kAvx2) return avx2_integer_kernel(format);
#endif
  return portable_integer_kernel(format);
}

constexpr int64_t kSegment = 32;  // the largest

int64_t segment_of(const PackedLayout& layout) {
  return layout.group >= layout.inputs ? kSegment : std::gcd(layout.group, kSegment);
}

// Rounds `size` numbers of a segment.
struct RoundSegment {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* a, int64_t size, int8_t* numbers, float* scale,
                          int32_t* sum) {
    float values[kSegment] = {};
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < size; ++i) values[i] = static_cast<float>(a[i]);
    for (int64_t i = 0; i < kSegment; ++i) {
      const float magnitude = std::abs(values[i]);
      largest = magnitude > largest ? magnitude : largest;
      finite &= magnitude <= std::numeric_limits<float>::max();
    }
    // The result of a row with infinity or NaN is NaN.
    *scale = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
    const float inverse = finite && largest > 0 ? 127 / largest : 0;
    int32_t total = 0;
    for (int64_t i = 0; i < kSegment; ++i) {
      const float scaled = finite ? values[i] * inverse : 0;
      const auto q = static_cast<int32_t>(std::nearbyint(scaled));
      numbers[i] = static_cast<int8_t>(std::clamp(q, -127, 127));
      total += numbers[i];
    }
    *sum = total;
  }
};

}  // namespace

IntegerKernel portable_integer_kernel(const PackedFormat& format) {
  return integer_kernel_of<PortableBytes>(format);
}

bool counts_up(const PackedFormat& format) {
  for (int code = 1; code < 16; ++code) {
    if (format.values[code] != format.values[code - 1] + 1) return false;
  }
  return true;
}

IntegerCodes integer_codes(const PackedFormat& format) {
  if (format.codes == Codes::kInt8) return {.factor = 1, .offset = 128, .table = {}};
  if (format.codes == Codes::kSixBits) return {.factor = 1, .offset = 32, .table = {}};
  if (counts_up(format)) {
    const auto offset = static_cast<int32_t>(-format.values[0]);
    return {.factor = 1, .offset = offset, .table = {}};
  }
  // The values are multiples of 1/2.
  IntegerCodes integers{.factor = 0.5f, .offset = 0, .table = {}};
  const float least = *std::min_element(std::begin(format.values), std::end(format.values));
  integers.offset = static_cast<int32_t>(-2 * least);
  for (int code = 0; code < 16; ++code) {
    integers.table[code] = static_cast<uint8_t>(2 * (format.values[code] - least));
  }
  return integers;
}

int64_t integer_workspace_size(int64_t m, int64_t k) {
  // Numbers, and the scale and the sum of each segment of at least 8 inputs.
  const int64_t width = at::round_up(k, kSegment);
  return m * (width / 4 + 2 * (width / kPackedInputs));
}

template <typename scalar_t>
void integer_gemm(int64_t m, const PackedLayout& layout, const uint8_t* panels, const scalar_t* a,
                  bool add, float* c, float* workspace) {
  const int64_t k = layout.inputs, n = layout.outputs, segment = segment_of(layout);
  const int64_t num_segments = at::ceil_div(k, segment), ld = at::round_up(k, kSegment);
  const IntegerCodes codes = integer_codes(*layout.format);
  float* scales = workspace;
  auto* sums = reinterpret_cast<int32_t*>(scales + m * num_segments);
  auto* numbers = reinterpret_cast<int8_t*>(sums + m * num_segments);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t s = 0; s < num_segments; ++s) {
      const int64_t first = s * segment, place = r * num_segments + s;
      // The next segments overwrite the zeros after this one.
      int8_t rounded[kSegment];
      vectorized<RoundSegment>(a + r * k + first, std::min(segment, k - first), +rounded,
                               scales + place, sums + place);
      std::copy_n(rounded, segment, numbers + r * ld + first);
      scales[place] *= codes.factor;
    }
  }
  const IntegerRows rows{.numbers = numbers,
                         .scales = scales,
                         .sums = sums,
                         .ld = ld,
                         .segment = segment,
                         .num_segments = num_segments};
  const auto kernel = kernel_of(*layout.format);
  const int64_t whole = n / kPanelOutputs, rest = n % kPanelOutputs;
  kernel(layout, codes, panels, whole, rows, m, add, c, n);
  for (int64_t r = 0; rest > 0 && r < m; ++r) {
    float last[kPanelOutputs] = {};
    float* to = c + r * n + n - rest;
    if (add) std::copy_n(to, rest, last);
    IntegerRows row = rows;
    row.numbers += r * ld;
    row.scales += r * num_segments;
    row.sums += r * num_segments;
    kernel(layout, codes, panels + whole * layout.panel_bytes(), 1, row, 1, add, last,
           kPanelOutputs);
    std::copy_n(last, rest, to);
  }
}

template void integer_gemm(int64_t, const PackedLayout&, const uint8_t*, const float*, bool, float*,
                           float*);
template void integer_gemm(int64_t, const PackedLayout&, const uint8_t*, const c10::Half*, bool,
                           float*, float*);
template void integer_gemm(int64_t, const PackedLayout&, const uint8_t*, const c10::BFloat16*, bool,
                           float*, float*);

}  // namespace moe_ext::cpu
