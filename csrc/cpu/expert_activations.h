// The rows and hidden layers of a block of an expert.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "arena.h"
#include "elementwise.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// All are rounded to scalar_t, whether saved or recomputed, so the gradients are bitwise identical.
template <typename scalar_t>
struct Activations {
  using acc_t = acc_type<scalar_t>;
  using Network = ExpertNetwork<scalar_t>;
  using Rows = ExpertRows<scalar_t>;

  // Takes memory for every block. Unless it `keeps` z, the z of a layer is lost when that of the
  // next layer is computed, or was where its activations are.
  Activations(Arena& arena, const Network& network, const Rows& rows, bool keeps_z)
      : first_copy(
            arena.take<scalar_t>(rows.has_slots() ? rows.most_in_block() * network.fan_in(0) : 0)) {
    const auto take = [&](int64_t width) {
      return arena.take<scalar_t>(rows.most_in_block() * width);
    };
    int64_t widest_apart = 0;  // of the z that cannot be where the activations are
    for (int64_t l = 0; l + 1 < network.num_layers(); ++l) {
      out.push_back(take(network.fan_in(l + 1)));
      if (is_gated(network, l)) widest_apart = std::max(widest_apart, network.columns(l));
    }
    scalar_t* const apart = take(keeps_z ? 0 : widest_apart);
    for (int64_t l = 0; l + 1 < network.num_layers(); ++l) {
      z.push_back(keeps_z ? take(network.columns(l)) : is_gated(network, l) ? apart : out[l]);
    }
  }

  // Takes the rows of a block. If `hidden` is not empty, z is in it.
  void take_rows(const Block& block, const Network& network, const Rows& rows,
                 std::span<scalar_t* const> hidden) {
    first = rows.gather(block, first_copy);
    for (size_t l = 0; l < hidden.size(); ++l) {
      z[l] = hidden[l] + block.first_row * network.columns(l);
    }
  }

  // Computes the hidden layers. In half precision, layer l uses products[(l + 1) % 2], [num_rows,
  // columns].
  void compute_hidden(const Block& block, const Network& network,
                      const typename Network::Workspace& workspace,
                      const std::array<acc_t*, 2>& products) const {
    for (int64_t l = 0; l + 1 < network.num_layers(); ++l) {
      const int64_t columns = network.columns(l), width = network.fan_in(l + 1);
      acc_t* product = products[(l + 1) % 2];
      if constexpr (Network::kSame) product = z[l];
      const auto activate = [&](const Region& region, [[maybe_unused]] const acc_t* sums,
                                [[maybe_unused]] int64_t ld) {
        if constexpr (!Network::kSame) vectorized<ConvertRegion>(sums, ld, region, columns, z[l]);
        network.function.activate(z[l], region, width, out[l]);
      };
      network.linear(block, l, network.all_columns(l), input(l), product, workspace,
                     {.run = activate, .next_b = network.weight(block.expert, l + 1)});
    }
  }

  static bool is_gated(const Network& network, int64_t layer) {
    return network.columns(layer) != network.fan_in(layer + 1);
  }

  const scalar_t* input(int64_t layer) const { return layer == 0 ? first : out[layer - 1]; }

  scalar_t* first_copy;
  const scalar_t* first = nullptr;  // [num_rows, fan_in], the input of the first layer
  std::vector<scalar_t*> z;         // [num_rows, columns] of each hidden layer
  std::vector<scalar_t*> out;       // the activations of z, the next layer's input
};

}  // namespace moe_ext::cpu
