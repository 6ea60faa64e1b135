// Packs parts of the operands of a GEMM into micro-panels, with the functions of the instruction
// set in use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../kernels/types.h"
#include "../../packed.h"
#include "../vectorize.h"
#include "gemm.h"
#include "micro_kernels.h"
#include "packing.h"
#include "unpacking.h"

namespace moe_ext::cpu {

// An operand as the micro-panels see it: element (i, p) is in row or column i of the micro-panels
// and at p along K.
template <typename T>
struct View {
  const T* data;
  int64_t ld;
  bool k_contiguous;
  const PackedLayout* layout = nullptr;  // of a packed operand
  const uint8_t* panels = nullptr;
  int64_t first_input = 0;

  const T* at(int64_t i, int64_t p) const {
    return data + (k_contiguous ? i * ld + p : p * ld + i);
  }
};

template <typename T>
View<T> view_of_a(const Operand<T>& a) {
  return {.data = a.data, .ld = a.ld, .k_contiguous = !a.transposed};
}

template <typename T>
View<T> view_of_b(const Operand<T>& b) {
  return {.data = b.data,
          .ld = b.ld,
          .k_contiguous = b.transposed,
          .layout = b.layout,
          .panels = b.panels,
          .first_input = b.first_input};
}

// Packs micro-panels for the micro-kernels of scalar_t.
template <typename scalar_t>
class Packer {
 public:
  using acc_t = acc_type<scalar_t>;

  // A packed B is unpacked in tiles of this many numbers along K, and at most as many columns. Its
  // micro-panels start at multiples of this along K.
  static constexpr int64_t kTileSize = 2 * kPanelOutputs;

  // `layout` is that of a packed B, or null.
  explicit Packer(const PackedLayout* layout)
      : code_kernels(layout == nullptr ? CodeKernels{}
                                       : cpu::code_kernels<scalar_t>(*layout->format)) {}

  // Packs the micro-panel of A at row i and a part of K.
  template <typename a_t>
  void pack_a(const View<a_t>& a, int64_t i, int64_t p, int64_t num_rows, int64_t depth,
              acc_t* to) const {
    pack(a, i, p, num_rows, depth, kernels.a_panel_width, kernels.a_in_row_blocks, to);
  }

  // Packs the micro-panel of B at column j and a part of K. The numbers of a packed B are rounded
  // to scalar_t.
  template <typename b_t>
  void pack_b(const View<b_t>& b, int64_t j, int64_t p, int64_t num_columns, int64_t depth,
              acc_t* to) const {
    if (b.layout == nullptr) {
      pack(b, j, p, num_columns, depth, kernels.nr(), /*by_columns=*/false, to);
    } else if (unpacks_in_place(b, depth)) {
      unpack_in_place(b, j, p, num_columns, depth, to);
    } else {
      unpack_tiles(b, j, p, num_columns, depth, to);
    }
  }

  const MicroKernels<acc_t>& kernels = micro_kernels<scalar_t, acc_t>();
  const CodeKernels code_kernels;  // null if B is not packed

 private:
  // Calls PackMicroPanel::run with the vectors of the instruction set in use.
  template <typename T>
  void pack(const View<T>& view, int64_t i, int64_t p, int64_t num_columns, int64_t depth,
            int64_t width, bool by_columns, acc_t* to) const {
    const T* from = view.at(i, p);
    const int64_t num_groups = kernels.num_groups(depth);
    const auto arguments = [&](auto run) {
      run(from, view.ld, view.k_contiguous, num_columns, depth, num_groups, width, by_columns, to);
    };
#if defined(__x86_64__)
    if constexpr (std::is_same_v<acc_t, float>) {
      if (kernels.pairs) {
        return arguments([](auto... all) { run_avx512<PackMicroPanel<Pairs<64>>>(all...); });
      }
    }
    if (isa() >= Isa::kAvx512) {
      return arguments([](auto... all) { run_avx512<PackMicroPanel<Groups<64, acc_t>>>(all...); });
    }
    if (isa() == Isa::kAvx2) {
      return arguments([](auto... all) { run_avx2<PackMicroPanel<Groups<32, acc_t>>>(all...); });
    }
#else
    if constexpr (std::is_same_v<acc_t, float>) {
      if (kernels.pairs) {
        return arguments([](auto... all) { PackMicroPanel<Pairs<16>>::run(all...); });
      }
    }
#endif
    arguments([](auto... all) { PackMicroPanel<Groups<16, acc_t>>::run(all...); });
  }

  // The kernel that writes the numbers of a panel as K-groups.
  UnpackKernel unpack_groups() const {
    return kernels.pairs ? code_kernels.unpack_pairs : code_kernels.unpack;
  }

  // Whether panels of a packed B can be unpacked to their places in a micro-panel.
  template <typename b_t>
  bool unpacks_in_place(const View<b_t>& b, int64_t depth) const {
    return std::is_same_v<acc_t, float> && !b.k_contiguous && unpack_groups() != nullptr &&
           kernels.nr() % kPanelOutputs == 0 && depth % kPackedInputs == 0 &&
           kernels.num_groups(depth) * kernels.group_size() == depth;
  }

  template <typename b_t>
  void unpack_in_place(const View<b_t>& b, int64_t j, int64_t p, int64_t num_columns, int64_t depth,
                       acc_t* to) const {
    for (int64_t i = 0; i < num_columns; i += kPanelOutputs) {
      const PanelInputs inputs{.panel = panel_of(b, j + i), .first = p, .size = depth};
      PanelInputs next = inputs;
      next.panel += b.layout->panel_bytes();
      unpack_groups()(*b.layout, inputs, next, to + i, kernels.nr());
    }
  }

  // Unpacks a tile at a time, and packs it.
  template <typename b_t>
  void unpack_tiles(const View<b_t>& b, int64_t j, int64_t p, int64_t num_columns, int64_t depth,
                    acc_t* to) const {
    constexpr int64_t kNumbers = (kTileSize + kPackedInputs) * kTileSize;
    float tile alignas(64)[kNumbers];
    constexpr bool kBFloat16 = std::is_same_v<scalar_t, c10::BFloat16>;
    c10::BFloat16 rounded alignas(64)[kBFloat16 ? kNumbers : 1];
    const bool rounds = kBFloat16 && code_kernels.unpack_rounded != nullptr;
    const auto unpack = rounds ? code_kernels.unpack_rounded : code_kernels.unpack;
    for (int64_t done = 0; done < depth; done += kTileSize) {
      const int64_t depth_of_tile = std::min(depth - done, kTileSize);
      // The part of W [inputs, outputs]. If B = W^T, K runs along the outputs.
      const int64_t input = b.k_contiguous ? b.first_input + j : p + done;
      const int64_t output = b.k_contiguous ? p + done : j;
      const int64_t num_outputs = b.k_contiguous ? depth_of_tile : num_columns;
      const int64_t first_input = input / kPackedInputs * kPackedInputs;
      const int64_t first_output = output / kPanelOutputs * kPanelOutputs;
      const int64_t num_inputs = b.k_contiguous ? num_columns : depth_of_tile;
      const int64_t num_rows = input + num_inputs - first_input;
      for (int64_t o = 0; first_output + o < output + num_outputs; o += kPanelOutputs) {
        const PanelInputs inputs{
            .panel = panel_of(b, first_output + o), .first = first_input, .size = num_rows};
        PanelInputs next = inputs;  // of the next tile, or if B = W^T of the next micro-panel
        next.first += num_inputs;
        unpack(*b.layout, inputs, next, rounds ? static_cast<void*>(rounded + o) : tile + o,
               kTileSize);
      }
      const auto pack_tile = [&](const auto* numbers) {
        const View<std::decay_t<decltype(*numbers)>> part{
            .data = numbers + (input - first_input) * kTileSize + output - first_output,
            .ld = kTileSize,
            .k_contiguous = b.k_contiguous};
        pack(part, 0, 0, num_columns, depth_of_tile, kernels.nr(), /*by_columns=*/false,
             to + done / kernels.group_size() * kernels.nr());
      };
      if (rounds) {
        pack_tile(static_cast<const c10::BFloat16*>(rounded));
      } else {
        pack_tile(static_cast<const float*>(tile));
      }
    }
  }

  template <typename b_t>
  static const uint8_t* panel_of(const View<b_t>& b, int64_t output) {
    return b.panels + output / kPanelOutputs * b.layout->panel_bytes();
  }
};

}  // namespace moe_ext::cpu
