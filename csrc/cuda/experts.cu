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
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const int64_t output = i % layout.outputs, row = i / layout.outputs;
  const uint8_t* panel =
      panels + row / layout.inputs * layout.bytes() + output / kPanelOutputs * layout.panel_bytes();
  weight[i] = static_cast<scalar_t>(
      math::unpacked(layout, panel, row % layout.inputs, output % kPanelOutputs));
}

// The two vectors of z with the pairs (a, b) of a vector of gated activations. Activation i of a
// row has a in column i and b in column width + i; if interleaved, in the columns 2 i and 2 i + 1.
template <typename Activation, typename scalar_t, int kSize>
struct GatedPairs {
  using Vec = Vector<scalar_t, kSize>;
  Vec first, second;

  // Returns the place of the first vector; `i` counts the vectors of activations, `vectors` are in
  // a row.
  static __device__ __forceinline__ int64_t place(int64_t i, int64_t vectors) {
    return Activation::kInterleaved ? 2 * i : i + i / vectors * vectors;
  }
  static __device__ __forceinline__ int64_t distance(int64_t vectors) {
    return Activation::kInterleaved ? 1 : vectors;
  }
  __device__ __forceinline__ scalar_t& a(int d) {
    return Activation::kInterleaved ? at(2 * d) : first.values[d];
  }
  __device__ __forceinline__ scalar_t& b(int d) {
    return Activation::kInterleaved ? at(2 * d + 1) : second.values[d];
  }

 private:
  __device__ __forceinline__ scalar_t& at(int column) {
    return column < kSize ? first.values[column] : second.values[column - kSize];
  }
};

// out = activation(z), or activation(a, b) if it is gated; a and b are `width` wide. A thread has
// some columns of a row.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
__global__ void activate_kernel(Activation activation, const scalar_t* __restrict__ z,
                                int64_t num_rows, int64_t width, scalar_t* __restrict__ out) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t vectors = width / kSize;
  const int64_t all = num_rows * vectors;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const auto* from = reinterpret_cast<const Vec*>(z);
    Vec activated;
    if constexpr (Activation::kGated) {
      using Pairs = GatedPairs<Activation, scalar_t, kSize>;
      const int64_t place = Pairs::place(i, vectors);
      Pairs pairs{from[place], from[place + Pairs::distance(vectors)]};
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        activated.values[d] = static_cast<scalar_t>(
            activation.value(static_cast<acc_t>(pairs.a(d)), static_cast<acc_t>(pairs.b(d))));
      }
    } else {
      const Vec a = from[i];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        activated.values[d] =
            static_cast<scalar_t>(activation.value(static_cast<acc_t>(a.values[d])));
      }
    }
    reinterpret_cast<Vec*>(out)[i] = activated;
  }
}

// grad_z = grad * activation'(z); for a and b if the activation is gated.
template <typename Activation, typename scalar_t, typename acc_t, int kSize>
__global__ void activate_backward_kernel(Activation activation, const scalar_t* __restrict__ z,
                                         const scalar_t* __restrict__ grad, int64_t num_rows,
                                         int64_t width, scalar_t* __restrict__ grad_z) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t vectors = width / kSize;
  const int64_t all = num_rows * vectors;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const Vec g = reinterpret_cast<const Vec*>(grad)[i];
    const auto* from = reinterpret_cast<const Vec*>(z);
    auto* to = reinterpret_cast<Vec*>(grad_z);
    if constexpr (Activation::kGated) {
      using Pairs = GatedPairs<Activation, scalar_t, kSize>;
      const int64_t place = Pairs::place(i, vectors), distance = Pairs::distance(vectors);
      Pairs pairs{from[place], from[place + distance]};
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const math::Pair<acc_t> gradient =
            activation.gradient(static_cast<acc_t>(g.values[d]), static_cast<acc_t>(pairs.a(d)),
                                static_cast<acc_t>(pairs.b(d)));
        pairs.a(d) = static_cast<scalar_t>(gradient.a);
        pairs.b(d) = static_cast<scalar_t>(gradient.b);
      }
      to[place] = pairs.first;
      to[place + distance] = pairs.second;
    } else {
      const Vec a = from[i];
      Vec grad_a;
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        grad_a.values[d] = static_cast<scalar_t>(
            activation.gradient(static_cast<acc_t>(g.values[d]), static_cast<acc_t>(a.values[d])));
      }
      to[i] = grad_a;
    }
  }
}

// One warp per token. P and dy may contain a loss scale, which keeps them in the range of half
// precision.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void gate_backward_kernel(scalar_t* __restrict__ p, const scalar_t* __restrict__ a,
                                     scalar_t* __restrict__ dy, const scalar_t* __restrict__ bias,
                                     RowGroups experts, Slots slots,
                                     const acc_t* __restrict__ gates, int64_t fan_in,
                                     int64_t columns, acc_t* __restrict__ grad_gates) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t t = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (t >= slots.num_tokens) return;  // uniform over the warp
  const int64_t end = slots.end(t);
  for (int64_t slot = slots.begin(t); slot < end; ++slot) {
    const int64_t row = slots.row(slot);
    const acc_t gate = gates[slot];
    auto* p_row = reinterpret_cast<Vec*>(p + row * fan_in);
    auto* dy_row = reinterpret_cast<Vec*>(dy + row * columns);
    const auto* a_row = reinterpret_cast<const Vec*>(a + row * fan_in);
    const scalar_t* expert_bias =
        bias == nullptr ? nullptr : bias + experts.group_of(row) * columns;
    acc_t product = 0;
    for (int64_t i = lane; i < fan_in / kSize; i += kWarp) {
      Vec ps = p_row[i];
      const Vec as = a_row[i];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t value = static_cast<acc_t>(ps.values[d]);
        product = std::fma(value, static_cast<acc_t>(as.values[d]), product);
        ps.values[d] = static_cast<scalar_t>(gate * value);
      }
      p_row[i] = ps;
    }
    for (int64_t i = lane; i < columns / kSize; i += kWarp) {
      Vec dys = dy_row[i];
#pragma unroll
      for (int d = 0; d < kSize; ++d) {
        const acc_t value = static_cast<acc_t>(dys.values[d]);
        if (expert_bias != nullptr) {
          product = std::fma(value, static_cast<acc_t>(expert_bias[i * kSize + d]), product);
        }
        dys.values[d] = static_cast<scalar_t>(gate * value);
      }
      dy_row[i] = dys;
    }
    product = warp_sum(product);
    if (lane == 0) grad_gates[slot] = product;
  }
}

// Sums a chunk of the rows; each lane of a warp has some columns.
template <typename scalar_t, typename acc_t, int kSize>
__global__ void partial_sums_by_expert_kernel(const scalar_t* __restrict__ rows, RowGroups experts,
                                              int64_t columns, int64_t chunk_size,
                                              acc_t* __restrict__ partial_sums) {
  using Vec = Vector<scalar_t, kSize>;
  const int64_t vectors = columns / kSize;
  const int64_t tiles = ceil_div(vectors, kWarp);
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / kWarp;
  const int64_t chunk = warp / tiles;
  const int64_t vector = warp % tiles * kWarp + threadIdx.x % kWarp;
  if (vector >= vectors) return;
  const auto add = [&](int64_t first, int count, acc_t(&sum)[kSize]) {
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
      const Vec row = reinterpret_cast<const Vec*>(rows)[(first + r) * vectors + vector];
#pragma unroll
      for (int d = 0; d < kSize; ++d) sum[d] += static_cast<acc_t>(row.values[d]);
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
  launch(stream, unpack_kernel<scalar_t>, grid(ceil_div(size, kThreads)), kThreads, 0,
         *layout.format, layout, panels, size, weight);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(UnpackedWeight)

template <typename scalar_t>
void Activate<scalar_t>::on_cuda(const CudaStream& stream) const {
  math::with_activation(activation, activation_args, [&](auto function) {
    with_vector_size<scalar_t>(width, {z, out}, [&](auto size) {
      launch(stream, activate_kernel<decltype(function), scalar_t, acc_type<scalar_t>, size>,
             strided_grid(num_rows * (width / size)), kThreads, 0, function, z, num_rows, width,
             out);
    });
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(Activate)

template <typename scalar_t>
void ActivateBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  math::with_activation(activation, activation_args, [&](auto function) {
    with_vector_size<scalar_t>(width, {z, grad, grad_z}, [&](auto size) {
      launch(stream,
             activate_backward_kernel<decltype(function), scalar_t, acc_type<scalar_t>, size>,
             strided_grid(num_rows * (width / size)), kThreads, 0, function, z, grad, num_rows,
             width, grad_z);
    });
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(ActivateBackward)

template <typename scalar_t>
void GateBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  with_vector_size<scalar_t>(std::gcd(fan_in, columns), {p, a, dy}, [&](auto size) {
    launch(stream, gate_backward_kernel<scalar_t, acc_t, size>,
           grid(ceil_div(slots.num_tokens * kWarp, kThreads)), kThreads, 0, p, a, dy, bias, experts,
           slots, gates, fan_in, columns, grad_gates);
  });
}
MOE_EXT_DEFINE_RUN_ON_CUDA(GateBackward)

template <typename scalar_t>
void SumByExpert<scalar_t>::on_cuda(const CudaStream& stream) const {
  const int64_t chunk_size = chunk_size_of(experts.num_rows);
  const int64_t num_chunks = ceil_div(experts.num_rows, chunk_size);
  auto* partial_sums = stream.take<acc_t>((num_chunks + experts.num_groups) * columns);
  with_vector_size<scalar_t>(columns, {rows}, [&](auto size) {
    const int64_t tiles = ceil_div(columns / size, kWarp);
    launch(stream, partial_sums_by_expert_kernel<scalar_t, acc_t, size>,
           grid(ceil_div(num_chunks * tiles, kThreads / kWarp)), kThreads, 0, rows, experts,
           columns, chunk_size, partial_sums);
  });
  launch(stream, sum_of_chunks_kernel<acc_t>, grid(experts.num_groups * ceil_div(columns, kWarp)),
         kThreads, 0, partial_sums, columns, experts, chunk_size, sums);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(SumByExpert)

}  // namespace moe_ext
