// lstm_cell: the host functions.
#pragma once

#include <tuple>
#include <utility>

#include "checks.h"
#include "device.h"
#include "kernels/lstm_cell.h"

namespace moe_ext {

inline void check_lstm_cell(const char* op, const Tensor& gates, const Tensor& c_0) {
  check_dim(op, "gates", gates, 2);
  check_floating(op, "gates", gates);
  check_dim(op, "c_0", c_0, 2);
  check_argument(op, "c_0", c_0, gates, gates.scalar_type(), {gates.sym_size(0), c_0.sym_size(1)});
  check_shape(op, "gates", gates, {gates.sym_size(0), 4 * c_0.sym_size(1)});
}

// Returns h and c.
template <typename Device>
std::tuple<Tensor, Tensor> lstm_cell(const Tensor& gates, const Tensor& c_0) {
  check_lstm_cell("lstm_cell", gates, c_0);
  Tensor h = empty_of(Device::empty, c_0), c = empty_of(Device::empty, c_0);
  Device::compute(gates, [&] {
    const Tensor z = gates.contiguous(), before = c_0.contiguous();
    with_type(z, [&]<typename scalar_t>() {
      Device::run(LstmCell<scalar_t>{.gates = z.const_data_ptr<scalar_t>(),
                                     .c_0 = before.const_data_ptr<scalar_t>(),
                                     .num_rows = before.size(0),
                                     .num_units = before.size(1),
                                     .h = h.mutable_data_ptr<scalar_t>(),
                                     .c = c.mutable_data_ptr<scalar_t>()});
    });
  });
  return {h, c};
}

// Returns the gradients of gates and c_0.
template <typename Device>
std::tuple<Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_h,
                                              const OptionalTensor& grad_c, const Tensor& gates,
                                              const Tensor& c_0) {
  constexpr auto op = "_lstm_cell_backward";
  check_lstm_cell(op, gates, c_0);
  for (const auto& [name, grad] : {std::pair("grad_h", &grad_h), {"grad_c", &grad_c}}) {
    if (*grad) check_argument(op, name, **grad, gates, gates.scalar_type(), c_0.sym_sizes());
  }
  Tensor grad_gates = empty_of(Device::empty, gates), grad_c_0 = empty_of(Device::empty, c_0);
  Device::compute(gates, [&] {
    const Tensor of_h = contiguous(grad_h), of_c = contiguous(grad_c), z = gates.contiguous(),
                 before = c_0.contiguous();
    with_type(z, [&]<typename scalar_t>() {
      Device::run(LstmCellBackward<scalar_t>{.grad_h = data_of<scalar_t>(of_h),
                                             .grad_c = data_of<scalar_t>(of_c),
                                             .gates = z.const_data_ptr<scalar_t>(),
                                             .c_0 = before.const_data_ptr<scalar_t>(),
                                             .num_rows = before.size(0),
                                             .num_units = before.size(1),
                                             .grad_gates = grad_gates.mutable_data_ptr<scalar_t>(),
                                             .grad_c_0 = grad_c_0.mutable_data_ptr<scalar_t>()});
    });
  });
  return {grad_gates, grad_c_0};
}

}  // namespace moe_ext
