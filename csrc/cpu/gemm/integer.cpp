#include "integer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "../../kernels/types.h"
#include "../../math/integers.h"
#include "../vectorize.h"

#define MOE_EXT_TARGET
#include "prefetch_ahead.h"

namespace moe_ext::cpu {
namespace {

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

// Rounds a row of A. Meanwhile it prefetches the bytes that the kernel reads first.
struct RoundRow {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* a, int64_t k, int64_t segment, const IntegerCodes* codes,
                          const uint8_t* next, int64_t num_bytes, int8_t* numbers, float* scales,
                          int32_t* offsets, float* totals) {
    for (int64_t byte = 0; byte < num_bytes; byte += kPageBytes) __builtin_prefetch(next + byte);
    const int64_t step = num_bytes / ceil_div(k, segment);
    for (int64_t first = 0; first < k; first += segment, next += step) {
      for (int64_t byte = 0; byte < step; byte += 64) __builtin_prefetch(next + byte);
      const auto [scale, sum] = round_segment(a + first, std::min(segment, k - first), numbers);
      // The next segment, or the next row, overwrites the zeros after this one.
      numbers += segment;
      *scales++ = scale * codes->factor;
      *offsets++ = -codes->offset * sum;
      *totals++ = scale * static_cast<float>(sum);
    }
  }

 private:
  // Writes kSegment numbers; returns s and the sum of the numbers.
  template <typename scalar_t>
  MOE_EXT_KERNEL std::pair<float, int32_t> round_segment(const scalar_t* a, int64_t size,
                                                         int8_t* numbers) {
    constexpr int32_t kSign = 0x7fffffff, kInfinity = 0x7f800000;
    float values[kSegment] = {};
    int32_t magnitudes[kSegment];
    if (size == kSegment) {
      for (int64_t i = 0; i < kSegment; ++i) values[i] = static_cast<float>(a[i]);
    } else {
      for (int64_t i = 0; i < size; ++i) values[i] = static_cast<float>(a[i]);
    }
    // As integers, floats without a sign have the same order, and NaN is the largest.
    std::memcpy(magnitudes, values, sizeof(values));
    int32_t most = 0;
    for (int64_t i = 0; i < kSegment; ++i) most = std::max(most, magnitudes[i] & kSign);
    if (most >= kInfinity) {
      // The result of a row with infinity or NaN is NaN.
      std::fill_n(numbers, kSegment, int8_t{0});
      return {std::numeric_limits<float>::quiet_NaN(), 0};
    }
    float largest;
    std::memcpy(&largest, &most, sizeof(largest));
    const float inverse = largest > 0 ? 127 / largest : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < kSegment; ++i) {
      const auto q = static_cast<int32_t>(std::nearbyint(values[i] * inverse));
      const int32_t number = std::clamp(q, -127, 127);
      numbers[i] = static_cast<int8_t>(number);
      sum += number;
    }
    return {largest / 127, sum};
  }
};

}  // namespace

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
  const int64_t width = round_up(k, kSegment), num_segments = width / kPackedInputs;
  // For each row its numbers, and the arrays of segments.
  return m * (width / 4 + 3 * num_segments) + kSegment / 4;
}

template <typename scalar_t>
void integer_gemm(int64_t m, int64_t n, const PackedLayout& layout, const uint8_t* panels,
                  const scalar_t* a, bool add, float* c, float* workspace) {
  const int64_t k = layout.inputs, segment = segment_of(layout);
  const int64_t num_segments = ceil_div(k, segment), ld = round_up(k, kSegment);
  const IntegerCodes codes = integer_codes(*layout.format);
  float* scales = workspace;
  float* totals = scales + m * num_segments;
  auto* offsets = reinterpret_cast<int32_t*>(totals + m * num_segments);
  auto* numbers = reinterpret_cast<int8_t*>(offsets + m * num_segments);
  for (int64_t r = 0; r < m; ++r) {
    const int64_t place = r * num_segments;
    const int64_t all_bytes = ceil_div(n, kPanelOutputs) * layout.panel_bytes();
    const int64_t num_bytes =
        r == 0 ? std::min(layout.panel_bytes() + kIntegerBytesAhead, all_bytes) : 0;
    vectorized<RoundRow>(a + r * k, k, segment, &codes, panels, num_bytes, numbers + r * ld,
                         scales + place, offsets + place, totals + place);
  }
  const IntegerRows rows{.numbers = numbers,
                         .scales = scales,
                         .offsets = offsets,
                         .totals = totals,
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
    row.offsets += r * num_segments;
    row.totals += r * num_segments;
    kernel(layout, codes, panels + whole * layout.panel_bytes(), 1, row, 1, add, last,
           kPanelOutputs);
    std::copy_n(last, rest, to);
  }
}

template void integer_gemm(int64_t, int64_t, const PackedLayout&, const uint8_t*, const float*,
                           bool, float*, float*);
template void integer_gemm(int64_t, int64_t, const PackedLayout&, const uint8_t*, const c10::Half*,
                           bool, float*, float*);
template void integer_gemm(int64_t, int64_t, const PackedLayout&, const uint8_t*,
                           const c10::BFloat16*, bool, float*, float*);

}  // namespace moe_ext::cpu
