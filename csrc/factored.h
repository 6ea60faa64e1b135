// factored_step_: the host function. It updates tensors in place and has no outputs.
#pragma once

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "checks.h"
#include "device.h"
#include "kernels/factored.h"

namespace moe_ext {

// Checks a scalar tensor, which may be on the CPU or on the device of `like`.
inline void check_scalar(const char* op, const char* name, const Tensor& scalar,
                         const Tensor& like) {
  if (!scalar.device().is_cpu()) check_device(op, name, scalar, like);
  check_type(op, name, scalar, at::kDouble);
  check_dim(op, name, scalar, 0);
}

// Checks that no tensor shares memory with one that is written to. The first `num_read` are not.
inline void check_apart(const char* op, size_t num_read,
                        const std::vector<std::pair<const char*, const Tensor*>>& tensors) {
  for (size_t i = num_read; i < tensors.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const auto overlap = at::get_overlap_status(*tensors[i].second, *tensors[j].second);
      const bool apart =
          overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial;
      TORCH_CHECK_VALUE(apart, op, ": ", tensors[i].first, " must not share memory with ",
                        tensors[j].first, ", got storage offsets ",
                        tensors[i].second->storage_offset(), " and ",
                        tensors[j].second->storage_offset());
    }
  }
}

// Returns whether elements of a tensor may share memory. They do not if each stride is larger than
// the extent of the axes with smaller strides. Symbolic strides cannot be sorted.
inline bool may_overlap(const Tensor& tensor) {
  const auto overlap = at::has_internal_overlap(tensor);
  if (overlap != at::MemOverlap::TooHard) return overlap == at::MemOverlap::Yes;
  const auto sizes = c10::asIntArrayRefSlowOpt(tensor.sym_sizes());
  const auto strides = c10::asIntArrayRefSlowOpt(tensor.sym_strides());
  if (!sizes || !strides || tensor.numel() == 0) return false;
  std::vector<std::pair<int64_t, int64_t>> axes;  // strides and sizes
  for (size_t d = 0; d < sizes->size(); ++d) {
    if ((*sizes)[d] > 1) axes.emplace_back((*strides)[d], (*sizes)[d]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t extent = 0;
  for (const auto& [stride, size] : axes) {
    if (stride <= extent) return true;
    extent += (size - 1) * stride;
  }
  return false;
}

inline void check_factored_step(const Tensor& param, const Tensor& grad, const Tensor& row,
                                const Tensor& column, const Tensor& lr, const Tensor& correction,
                                double decay, double gain, double eps) {
  constexpr auto op = "factored_step_";
  TORCH_CHECK_VALUE(param.dim() >= 2, op, ": param must have at least 2 dimensions, got shape ",
                    param.sym_sizes());
  check_floating(op, "param", param);
  check_argument(op, "grad", grad, param, param.scalar_type(), param.sym_sizes());
  const auto type = accumulate_type(param);
  std::vector<c10::SymInt> shape = param.sym_sizes().vec();
  const auto num_columns = shape.back();
  shape.pop_back();
  check_argument(op, "row", row, param, type, shape);
  shape.back() = num_columns;
  check_argument(op, "column", column, param, type, shape);
  for (const auto& [name, tensor] :
       {std::pair{"param", &param}, {"row", &row}, {"column", &column}}) {
    TORCH_CHECK_VALUE(!may_overlap(*tensor), op, ": ", name,
                      " must not have elements that share memory, got strides ",
                      tensor->sym_strides());
  }
  if (!param.is_meta()) {
    check_apart(op, /*num_read=*/3,
                {{"lr", &lr},
                 {"correction", &correction},
                 {"grad", &grad},
                 {"param", &param},
                 {"row", &row},
                 {"column", &column}});
  }
  check_scalar(op, "lr", lr, param);
  check_scalar(op, "correction", correction, param);
  for (const auto& [name, value] : {std::pair{"decay", decay}, {"gain", gain}}) {
    TORCH_CHECK_VALUE(value >= 0, op, ": ", name, " must be at least 0, got ", value);
  }
  const double in_type = in_accumulate_type(param, eps);
  TORCH_CHECK_VALUE(in_type > 0, op, ": eps must be positive in the dtype of row, got ", eps);
}

template <typename Device>
void factored_step(Tensor& param, const Tensor& grad, Tensor& row, Tensor& column, const Tensor& lr,
                   const Tensor& correction, double decay, double gain, double eps,
                   bool mean_of_roots) {
  check_factored_step(param, grad, row, column, lr, correction, decay, gain, eps);
  Device::compute(param, [&] {
    if (param.numel() == 0) return;
    const Tensor g = grad.contiguous(), p = param.contiguous(), r = row.contiguous(),
                 c = column.contiguous();
    const auto scalar = [](const Tensor& tensor) {
      const auto* number = tensor.const_data_ptr<double>();
      return tensor.is_cpu() ? FactoredScalar{.on_device = nullptr, .on_host = *number}
                             : FactoredScalar{.on_device = number, .on_host = 0};
    };
    with_type(p, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(FactoredStep<scalar_t>{.param = p.mutable_data_ptr<scalar_t>(),
                                         .grad = g.const_data_ptr<scalar_t>(),
                                         .row = r.mutable_data_ptr<acc_t>(),
                                         .column = c.mutable_data_ptr<acc_t>(),
                                         .num_matrices = p.numel() / (p.size(-2) * p.size(-1)),
                                         .num_rows = p.size(-2),
                                         .num_columns = p.size(-1),
                                         .lr = scalar(lr),
                                         .correction = scalar(correction),
                                         .decay = decay,
                                         .gain = gain,
                                         .eps = eps,
                                         .mean_of_roots = mean_of_roots});
    });
    if (!p.is_same(param)) param.copy_(p);
    if (!r.is_same(row)) row.copy_(r);
    if (!c.is_same(column)) column.copy_(c);
  });
}

}  // namespace moe_ext
