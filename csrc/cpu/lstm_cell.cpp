// The cells of one step of an LSTM on the CPU, whose gates come from the caller.
#include "../lstm_cell.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include "../implement.h"
#include "../math/lstm.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

// The cost of a unit, in element accesses.
constexpr int64_t kWorkPerUnit = 32;

// Computes h and c of one row.
struct CellRow {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* gates, const scalar_t* c_0, int64_t units,
                          scalar_t* __restrict h, scalar_t* __restrict c) {
    using acc_t = at::opmath_type<scalar_t>;
    const auto wide = [&](int64_t i) __attribute__((always_inline)) {
      return static_cast<acc_t>(gates[i]);
    };
    for (int64_t u = 0; u < units; ++u) {
      const auto each =
          math::lstm_gates(wide(u), wide(units + u), wide(2 * units + u), wide(3 * units + u));
      const auto cell = math::lstm_cell(each, static_cast<acc_t>(c_0[u]));
      h[u] = static_cast<scalar_t>(cell.r);
      c[u] = static_cast<scalar_t>(cell.c);
    }
  }
};

// Computes the gradients of one row; recomputes the cells. A gradient of null is 0.
struct CellRowBackward {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* grad_h, const scalar_t* grad_c, const scalar_t* gates,
                          const scalar_t* c_0, int64_t units, scalar_t* __restrict grad_gates,
                          scalar_t* __restrict grad_c_0) {
    using acc_t = at::opmath_type<scalar_t>;
    const auto wide = [&](int64_t i) __attribute__((always_inline)) {
      return static_cast<acc_t>(gates[i]);
    };
    const auto or_zero = [](const scalar_t* grad, int64_t u) __attribute__((always_inline)) {
      return grad == nullptr ? acc_t(0) : static_cast<acc_t>(grad[u]);
    };
    for (int64_t u = 0; u < units; ++u) {
      const auto each =
          math::lstm_gates(wide(u), wide(units + u), wide(2 * units + u), wide(3 * units + u));
      const acc_t before = static_cast<acc_t>(c_0[u]);
      const auto cell = math::lstm_cell(each, before);
      acc_t of_c = or_zero(grad_c, u), h;
      const auto grad = math::lstm_gradient(each, before, cell.c, or_zero(grad_h, u), of_c, h);
      grad_gates[u] = static_cast<scalar_t>(grad.i);
      grad_gates[units + u] = static_cast<scalar_t>(grad.f);
      grad_gates[2 * units + u] = static_cast<scalar_t>(grad.j);
      grad_gates[3 * units + u] = static_cast<scalar_t>(grad.o);
      grad_c_0[u] = static_cast<scalar_t>(of_c);
    }
  }
};

std::tuple<Tensor, Tensor> lstm_cell_cpu(const Tensor& gates, const Tensor& c_0) {
  constexpr auto op = "lstm_cell";
  check_lstm_cell(op, gates, c_0);
  const auto outputs = lstm_cell_outputs(empty, c_0);
  const auto& [h, c] = outputs;
  const Tensor z = gates.contiguous(), before = c_0.contiguous();
  const int64_t units = c_0.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), op, [&] {
    const auto* z_data = z.const_data_ptr<scalar_t>();
    const auto* before_data = before.const_data_ptr<scalar_t>();
    auto* h_data = h.mutable_data_ptr<scalar_t>();
    auto* c_data = c.mutable_data_ptr<scalar_t>();
    parallel_for(z.size(0), kWorkPerUnit * units, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        vectorized<CellRow>(z_data + 4 * row * units, before_data + row * units, units,
                            h_data + row * units, c_data + row * units);
      }
    });
  });
  return outputs;
}

std::tuple<Tensor, Tensor> lstm_cell_backward_cpu(const OptionalTensor& grad_h,
                                                  const OptionalTensor& grad_c, const Tensor& gates,
                                                  const Tensor& c_0) {
  check_lstm_cell_backward(grad_h, grad_c, gates, c_0);
  const auto gradients = lstm_cell_gradients(empty, gates, c_0);
  const auto& [grad_gates, grad_c_0] = gradients;
  const Tensor of_h = contiguous(grad_h), of_c = contiguous(grad_c);
  const Tensor z = gates.contiguous(), before = c_0.contiguous();
  const int64_t units = c_0.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, z.scalar_type(), "_lstm_cell_backward", [&] {
        const auto row_of = [&](const Tensor& grad, int64_t row) {
          return grad.defined() ? grad.const_data_ptr<scalar_t>() + row * units : nullptr;
        };
        const auto* z_data = z.const_data_ptr<scalar_t>();
        const auto* before_data = before.const_data_ptr<scalar_t>();
        auto* to_gates = grad_gates.mutable_data_ptr<scalar_t>();
        auto* to_c_0 = grad_c_0.mutable_data_ptr<scalar_t>();
        parallel_for(z.size(0), kWorkPerUnit * units, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            vectorized<CellRowBackward>(row_of(of_h, row), row_of(of_c, row),
                                        z_data + 4 * row * units, before_data + row * units, units,
                                        to_gates + 4 * row * units, to_c_0 + row * units);
          }
        });
      });
  return gradients;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"lstm_cell", &moe_ext::cpu::lstm_cell_cpu>(m);
  moe_ext::implement<"_lstm_cell_backward", &moe_ext::cpu::lstm_cell_backward_cpu>(m);
}
