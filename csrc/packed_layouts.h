// The checks of packed weights, and their layouts.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "activation.h"
#include "checks.h"
#include "experts_arguments.h"
#include "packed.h"

namespace moe_ext {

inline void check_packed_layers(const char* op, at::TensorList weights,
                                const PackedLayers& packed) {
  const size_t num_layers = weights.size();
  for (const auto& [name, size] : {std::pair("formats", packed.formats.size()),
                                   {"groups", packed.groups.size()},
                                   {"columns", packed.columns.size()}}) {
    TORCH_CHECK_VALUE(size == num_layers, op, ": ", name, " must have one value for each of ",
                      num_layers, " weights, got ", size);
  }
  TORCH_CHECK_VALUE(packed.arithmetic == "exact" || packed.is_integer(), op,
                    ": arithmetic must be exact or integer, got '", packed.arithmetic, "'");
}

// Returns the layout of a layer; checks its format, group and columns.
inline PackedLayout packed_layout(const char* op, const PackedLayers& packed, size_t layer,
                                  const c10::SymInt& fan_in) {
  const std::string name = packed.formats.get(layer);
  const auto* format = std::find_if(std::begin(kPackedFormats), std::end(kPackedFormats),
                                    [&](const PackedFormat& each) { return each.name == name; });
  if (format == std::end(kPackedFormats)) {
    std::string names;
    for (const PackedFormat& each : kPackedFormats) append_name(names, each.name);
    TORCH_CHECK_VALUE(false, op, ": formats[", layer, "] must be one of ", names, ", got '", name,
                      "'");
  }
  const int64_t inputs = fan_in.guard_int(__FILE__, __LINE__), columns = packed.columns[layer];
  TORCH_CHECK_VALUE(columns >= 0, op, ": columns[", layer, "] must be at least 0, got ", columns);
  const int64_t group = packed.groups[layer];
  TORCH_CHECK_VALUE(group > 0 && (group % kPackedInputs == 0 || group >= inputs), op, ": groups[",
                    layer, "] must be a multiple of ", kPackedInputs, " or all ", inputs,
                    " inputs, got ", group);
  TORCH_CHECK_VALUE(format->group == 0 || (format->group == group && inputs % group == 0), op,
                    ": groups[", layer, "] must be ", format->group,
                    ", a divisor of the inputs, for ", name, ", got ", group, " and ", inputs,
                    " inputs");
  const PackedLayout layout{.format = format, .inputs = inputs, .outputs = columns, .group = group};
  TORCH_CHECK_VALUE(!packed.is_integer() || layout.is_integer(), op, ": formats[", layer,
                    "] must have integer values in integer arithmetic, got '", name, "'");
  return layout;
}

// Returns the layouts of all layers of a checked network; empty if the weights are not packed.
inline std::vector<PackedLayout> packed_layouts(const FeedForward& network, int64_t fan_in) {
  std::vector<PackedLayout> layouts;
  if (!network.packed) return layouts;
  const bool gated = check_activation(network.op(), network.activation, network.activation_args);
  for (size_t l = 0; l < network.weights.size(); ++l) {
    layouts.push_back(packed_layout(network.op(), *network.packed, l, fan_in));
    fan_in = gated ? layouts[l].outputs / 2 : layouts[l].outputs;
  }
  return layouts;
}

inline void check_packed_weight(const char* op, const char* name, const Tensor& weight,
                                const Tensor& x, const c10::SymInt& num_experts,
                                const PackedLayout& layout) {
  check_argument(op, name, weight, x, at::kByte,
                 {num_experts, layout.num_panels(), layout.panel_bytes()});
}

}  // namespace moe_ext
