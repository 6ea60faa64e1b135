// The cells of one step of an LSTM on CUDA; one thread for each unit.

#include "../kernels/lstm_cell.h"
#include "../math/lstm.h"
#include "launch.cuh"

namespace moe_ext {
namespace cuda {
namespace {

// The gates of unit u of a row, after their activations.
template <typename acc_t, typename scalar_t>
__device__ math::LstmGates<acc_t> gates_of(const scalar_t* gates, int64_t units, int64_t u) {
  return math::lstm_gates(static_cast<acc_t>(gates[u]), static_cast<acc_t>(gates[units + u]),
                          static_cast<acc_t>(gates[2 * units + u]),
                          static_cast<acc_t>(gates[3 * units + u]));
}

template <typename scalar_t, typename acc_t>
__global__ void cell_kernel(const scalar_t* __restrict__ gates, const scalar_t* __restrict__ c_0,
                            int64_t size, int64_t units, scalar_t* __restrict__ h,
                            scalar_t* __restrict__ c) {
  const int64_t i = index_of_thread();
  if (i >= size) return;
  const auto each = gates_of<acc_t>(gates + 4 * (i / units) * units, units, i % units);
  const auto cell = math::lstm_cell(each, static_cast<acc_t>(c_0[i]));
  h[i] = static_cast<scalar_t>(cell.r);
  c[i] = static_cast<scalar_t>(cell.c);
}

// Recomputes the cells. A gradient of null is 0.
template <typename scalar_t, typename acc_t>
__global__ void cell_backward_kernel(const scalar_t* __restrict__ grad_h,
                                     const scalar_t* __restrict__ grad_c,
                                     const scalar_t* __restrict__ gates,
                                     const scalar_t* __restrict__ c_0, int64_t size, int64_t units,
                                     scalar_t* __restrict__ grad_gates,
                                     scalar_t* __restrict__ grad_c_0) {
  const int64_t i = index_of_thread();
  if (i >= size) return;
  const int64_t first = 4 * (i / units) * units, u = i % units;
  const auto each = gates_of<acc_t>(gates + first, units, u);
  const acc_t before = static_cast<acc_t>(c_0[i]);
  const acc_t of_h = grad_h == nullptr ? acc_t(0) : static_cast<acc_t>(grad_h[i]);
  acc_t of_c = grad_c == nullptr ? acc_t(0) : static_cast<acc_t>(grad_c[i]), h;
  const auto cell = math::lstm_cell(each, before);
  const auto grad = math::lstm_gradient(each, before, cell.c, of_h, of_c, h);
  grad_gates[first + u] = static_cast<scalar_t>(grad.i);
  grad_gates[first + units + u] = static_cast<scalar_t>(grad.f);
  grad_gates[first + 2 * units + u] = static_cast<scalar_t>(grad.j);
  grad_gates[first + 3 * units + u] = static_cast<scalar_t>(grad.o);
  grad_c_0[i] = static_cast<scalar_t>(of_c);
}

}  // namespace
}  // namespace cuda
using namespace cuda;

template <typename scalar_t>
void LstmCell<scalar_t>::on_cuda(const CudaStream& stream) const {
  const int64_t size = num_rows * num_units;
  launch_threads(stream, cell_kernel<scalar_t, acc_type<scalar_t>>, size, gates, c_0, size,
                 num_units, h, c);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(LstmCell)

template <typename scalar_t>
void LstmCellBackward<scalar_t>::on_cuda(const CudaStream& stream) const {
  const int64_t size = num_rows * num_units;
  launch_threads(stream, cell_backward_kernel<scalar_t, acc_type<scalar_t>>, size, grad_h, grad_c,
                 gates, c_0, size, num_units, grad_gates, grad_c_0);
}
MOE_EXT_DEFINE_RUN_ON_CUDA(LstmCellBackward)

}  // namespace moe_ext
