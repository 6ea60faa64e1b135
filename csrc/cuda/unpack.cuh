// Packed weights on CUDA: unpacked to memory in each call.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "../math/packed.h"
#include "launch.cuh"

namespace moe_ext::cuda {

// Writes w [E, inputs, outputs].
template <typename scalar_t>
__global__ void unpack_kernel(PackedFormat format, PackedLayout layout, const uint8_t* panels,
                              int64_t size, scalar_t* weight) {
  layout.format = &format;  // the host has another address
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const int64_t output = i % layout.outputs, row = i / layout.outputs;
  const uint8_t* panel =
      panels + row / layout.inputs * layout.bytes() + output / kPanelOutputs * layout.panel_bytes();
  weight[i] = static_cast<scalar_t>(
      math::unpacked(layout, panel, row % layout.inputs, output % kPanelOutputs));
}

// Returns the weight of packed panels [E, panels, bytes] as [E, inputs, outputs].
inline Tensor unpacked(const Tensor& panels, const PackedLayout& layout,
                       const at::TensorOptions& options) {
  const Tensor source = panels.contiguous();
  Tensor weight = at::empty({panels.size(0), layout.inputs, layout.outputs}, options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weight.scalar_type(), "unpacked", [&] {
    launch(unpack_kernel<scalar_t>, grid(ceil_div(weight.numel(), kThreads)), kThreads, 0,
           *layout.format, layout, source.const_data_ptr<uint8_t>(), weight.numel(),
           weight.mutable_data_ptr<scalar_t>());
  });
  return weight;
}

}  // namespace moe_ext::cuda
