// The cells of one step of an LSTM on the CPU, whose gates come from the caller.
#include "../kernels/lstm_cell.h"

#include "../math/lstm.h"
#include "parallel.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// The cost of a unit, in element accesses.
constexpr int64_t kWorkPerUnit = 32;

// Computes h and c of one row.
struct CellRow {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* gates, const scalar_t* c_0, int64_t units,
                          scalar_t* __restrict h, scalar_t* __restrict c) {
    using acc_t = acc_type<scalar_t>;
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
    using acc_t = acc_type<scalar_t>;
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

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void LstmCell<scalar_t>::on_cpu() const {
  parallel_for(num_rows, kWorkPerUnit * num_units, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row * num_units;
      vectorized<CellRow>(gates + 4 * first, c_0 + first, num_units, h + first, c + first);
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(LstmCell)

template <typename scalar_t>
void LstmCellBackward<scalar_t>::on_cpu() const {
  const auto row_of = [](const scalar_t* grad, int64_t first) {
    return grad != nullptr ? grad + first : nullptr;
  };
  parallel_for(num_rows, kWorkPerUnit * num_units, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row * num_units;
      vectorized<CellRowBackward>(row_of(grad_h, first), row_of(grad_c, first), gates + 4 * first,
                                  c_0 + first, num_units, grad_gates + 4 * first, grad_c_0 + first);
    }
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(LstmCellBackward)

}  // namespace moe_ext
