// The kernels of the experts on CUDA that are no GEMMs.
#include <numeric>

#include "../kernels/experts.h"
#include "../math/activation.h"
#include "../math/packed.h"
#include "chunks.cuh"
#include "vectors.cuh"

namespace moe_ext {
namespace cuda {
namespace {

template <typename scalar_t>
__global__ void unpack_kernel(PackedFormat format, PackedLayout layout, const uint8_t* panels,
                              int64_t size, scalar_t* weight) {
  layout.format = &format;  // the host has another address
  const int64_t i = index_of_thread();
  if (i >= size) return;
  const int64_t output = i % layout.outputs, row = i / layout.outputs;
  const uint8_t* panel =
      panels + row / layout.inputs * layout.bytes() + output / kPanelOutputs * layout.panel_bytes();
  weight[i] = static_cast<scalar_t>(
      math::unpacked(layout, panel, row % layout.inputs, output % kPanelOutputs));
}

// The pre-activations z + bias of kSize activations: a and, if the activation is gated, b.
// Activation i of a row has a in column i of z and b in column width + i; if interleaved, in the
// columns 2 i and 2 i + 1.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
class PreActivations {
 public:
  static constexpr int kVectors = Activation::kGated ? 2 : 1;
  using Vec = Vector<scalar_t, kSize>;

  // Reads those of a vector of activations. `vectors` are in a row.
  __device__ __forceinline__ PreActivations(const scalar_t* z_row, const scalar_t* bias_row,
                                            int64_t vector, int64_t vectors) {
#pragma unroll
    for (int part = 0; part < kVectors; ++part) {
      const int64_t at = place(part, vector, vectors);
      const Vec z = reinterpret_cast<const Vec*>(z_row)[at];
      Vec bias = {};
      if (bias_row != nullptr) bias = reinterpret_cast<const Vec*>(bias_row)[at];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        columns_[part * kSize + d] =
            static_cast<acc_t>(z.values[d]) + static_cast<acc_t>(bias.values[d]);
      }
    }
  }

  __device__ __forceinline__ acc_t value(const Activation& activation, int d) const {
    if constexpr (Activation::kGated) {
      return activation.value(columns_[column_of_a(d)], columns_[column_of_b(d)]);
    } else {
      return activation.value(columns_[d]);
    }
  }

  // Replaces the pre-activations of an activation by their gradients.
  __device__ __forceinline__ void differentiate(const Activation& activation, acc_t grad, int d) {
    if constexpr (Activation::kGated) {
      acc_t &a = columns_[column_of_a(d)], &b = columns_[column_of_b(d)];
      const math::Pair<acc_t> gradient = activation.gradient(grad, a, b);
      a = gradient.a;
      b = gradient.b;
    } else {
      columns_[d] = activation.gradient(grad, columns_[d]);
    }
  }

  __device__ __forceinline__ void write(scalar_t* row, int64_t vector, int64_t vectors) const {
#pragma unroll
    for (int part = 0; part < kVectors; ++part) {
      Vec out;
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        out.values[d] = static_cast<scalar_t>(columns_[part * kSize + d]);
      }
      reinterpret_cast<Vec*>(row)[place(part, vector, vectors)] = out;
    }
  }

 private:
  static __device__ __forceinline__ int64_t place(int part, int64_t vector, int64_t vectors) {
    return Activation::kInterleaved ? 2 * vector + part : vector + part * vectors;
  }
  static __device__ __forceinline__ constexpr int column_of_a(int d) {
    return Activation::kInterleaved ? 2 * d : d;
  }
  static __device__ __forceinline__ constexpr int column_of_b(int d) {
    return Activation::kInterleaved ? 2 * d + 1 : kSize + d;
  }

  acc_t columns_[kVectors * kSize];
};

// Returns the row of values [E, width] of a row's expert; null if there are none.
template <typename T>
__device__ __forceinline__ const T* expert_row(const T* values, const RowGroups& experts,
                                               int64_t row, int64_t width) {
  return values == nullptr ? nullptr : values + experts.group_of(row) * width;
}

// A thread has a vector of activations of a row.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
__global__ void activate_kernel(Activation activation, const scalar_t* __restrict__ z,
                                const scalar_t* __restrict__ bias, RowGroups experts, int64_t width,
                                scalar_t* __restrict__ out) {
  using Inputs = PreActivations<Activation, scalar_t, acc_t, kSize>;
  const int64_t vectors = width / kSize, columns = width * Inputs::kVectors;
  const int64_t all = experts.num_rows * vectors;
  for (int64_t i = index_of_thread(); i < all; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = i / vectors;
    const Inputs inputs(z + row * columns, expert_row(bias, experts, row, columns),
                        i - row * vectors, vectors);
    Vector<scalar_t, kSize> activated;
#pragma unroll
    for (int d = 0; d < kSize; ++d) {
      activated.values[d] = static_cast<scalar_t>(inputs.value(activation, d));
    }
    reinterpret_cast<Vector<scalar_t, kSize>*>(out)[i] = activated;
  }
}

__device__ __forceinline__ int64_t token_of(const Slots& slots, int64_t slot) {
  return RowGroups{
      .bounds = slots.bounds, .num_groups = slots.num_tokens, .num_rows = slots.num_slots}
      .group_of(slot);
}

// Returns a lane's share of the scalar product of two vectors.
template <typename acc_t, int kSize, typename scalar_t>
__device__ __forceinline__ acc_t partial_product(const scalar_t* a, const scalar_t* b,
                                                 int64_t size) {
  using Vec = Vector<scalar_t, kSize>;
  acc_t product = 0;
  for (int64_t i = threadIdx.x % kWarp; i < size / kSize; i += kWarp) {
    const Vec as = reinterpret_cast<const Vec*>(a)[i], bs = reinterpret_cast<const Vec*>(b)[i];
#pragma unroll
    for (int d = 0; d < kSize; ++d) {
      product =
          std::fma(static_cast<acc_t>(as.values[d]), static_cast<acc_t>(bs.values[d]), product);
    }
  }
  return product;
}

// A warp has a row: the row of a slot, if there are gates.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
__global__ void activate_backward_kernel(Activation activation, const scalar_t* __restrict__ z,
                                         const scalar_t* __restrict__ bias,
                                         const scalar_t* __restrict__ p, RowGroups experts,
                                         int64_t width, GatesBackward<scalar_t> gates,
                                         scalar_t* __restrict__ a, scalar_t* __restrict__ grad_z) {
  using Vec = Vector<scalar_t, kSize>;
  using Inputs = PreActivations<Activation, scalar_t, acc_t, kSize>;
  const bool has_gates = gates.gates != nullptr;
  const int64_t vectors = width / kSize, columns = width * Inputs::kVectors;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int64_t slot = index_of_warp(); slot < experts.num_rows; slot += num_warps) {
    const int64_t row = has_gates ? gates.slots.row(slot) : slot;
    const acc_t gate = has_gates ? gates.gates[slot] : acc_t(1);
    const acc_t factor = gates.multiplies_a ? gate : acc_t(1);
    const scalar_t* bias_row = expert_row(bias, experts, row, columns);
    acc_t product = 0;  // <P, A>
    for (int64_t vector = lane; vector < vectors; vector += kWarp) {
      Inputs inputs(z + row * columns, bias_row, vector, vectors);
      const Vec grads = reinterpret_cast<const Vec*>(p + row * width)[vector];
      Vec activated;
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t grad = static_cast<acc_t>(grads.values[d]);
        const acc_t value = inputs.value(activation, d);
        product = std::fma(grad, value, product);
        activated.values[d] = static_cast<scalar_t>(factor * value);
        inputs.differentiate(activation, gate * grad, d);
      }
      if (a != nullptr) reinterpret_cast<Vec*>(a + row * width)[vector] = activated;
      if (grad_z != nullptr) inputs.write(grad_z + row * columns, vector, vectors);
    }
    if (!has_gates) continue;
    if (gates.bias != nullptr) {
      product += partial_product<acc_t, kSize>(
          gates.dy + token_of(gates.slots, slot) * gates.columns,
          expert_row(gates.bias, experts, row, gates.columns), gates.columns);
    }
    product = warp_sum(product);
    if (lane == 0) {
      gates.grad_gates[slot] = product;
      gates.row_gates[row] = gate;
    }
  }
}

// Sums a chunk of the rows; each lane of a warp has some columns.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void partial_sums_by_expert_kernel(const scalar_t* __restrict__ rows,
                                              const acc_t* __restrict__ weights, RowGroups experts,
                                              int64_t columns, int64_t chunk_size,
                                              acc_t* __restrict__ partial_sums) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t vectors = columns / kSize;
  const int64_t tiles = ceil_div(vectors, kWarp);
  const int64_t warp = index_of_warp();
  const int64_t chunk = warp / tiles;
  const int64_t vector = warp % tiles * kWarp + threadIdx.x % kWarp;
  if (vector >= vectors) return;
  const auto add = [&](int64_t first, int count, acc_t(&sum)[kSize]) {
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
      const Vec row = reinterpret_cast<const Vec*>(rows)[(first + r) * vectors + vector];
      const acc_t weight = weights != nullptr ? weights[first + r] : acc_t(1);
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        sum[d] = std::fma(weight, static_cast<acc_t>(row.values[d]), sum[d]);
      }
    }
  };
  sums_of_chunk<acc_t, kSize>(experts, chunk, chunk_size, add, [&](int64_t place, const auto& sum) {
#pragma unroll
    for (int d = 0; d < kSize; ++d) partial_sums[place * columns + vector * kSize + d] = sum[d];
  });
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void UnpackedWeight<scalar_t>::on_cuda(const CudaStream& stream) const {
  const int64_t size = num_experts * layout.inputs * layout.outputs;
  launch_threads(stream, unpack_kernel<scalar_t>, size, *layout.format, layout, panels, size,
                 weight);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(UnpackedWeight)

template <typename scalar_t>
void Activate<scalar_t>::on_cuda(const CudaStream& stream) const {
  math::with_activation(activation, activation_args, [&](auto function) {
    with_vector_size<scalar_t>(width, {z, bias, out}, [&](auto size) {
      launch_strided(stream,
                     activate_kernel<decltype(function), scalar_t, acc_type<scalar_t>, size>,
                     experts.num_rows * (width / size), function, z, bias, experts, width, out);
    });
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(Activate)

template <typename scalar_t>
void ActivateBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  math::with_activation(activation, activation_args, [&](auto function) {
    const int64_t columns = gates.bias != nullptr ? gates.columns : 0;
    with_vector_size<scalar_t>(
        std::gcd(width, columns), {z, bias, p, gates.dy, gates.bias, a, grad_z}, [&](auto size) {
          launch_strided(
              stream,
              activate_backward_kernel<decltype(function), scalar_t, acc_type<scalar_t>, size>,
              experts.num_rows * kWarp, function, z, bias, p, experts, width, gates, a, grad_z);
        });
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(ActivateBackward)

template <typename scalar_t>
void SumByExpert<scalar_t>::on_cuda(const CudaStream& stream) const {
  const int64_t chunk_size = chunk_size_of(experts.num_rows);
  const int64_t num_chunks = ceil_div(experts.num_rows, chunk_size);
  auto* partial_sums = stream.take<acc_t>((num_chunks + experts.num_groups) * columns);
  with_vector_size<scalar_t>(columns, {rows}, [&](auto size) {
    const int64_t tiles = ceil_div(columns / size, kWarp);
    launch_warps(stream, partial_sums_by_expert_kernel<scalar_t, acc_t, size>, num_chunks * tiles,
                 rows, weights, experts, columns, chunk_size, partial_sums);
  });
  launch_blocks(stream, sum_of_chunks_kernel<acc_t>, experts.num_groups * ceil_div(columns, kWarp),
                partial_sums, columns, experts, chunk_size, sums);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(SumByExpert)

}  // namespace moe_ext
