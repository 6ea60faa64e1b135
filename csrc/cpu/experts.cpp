// The experts on the CPU: gather of the tokens, feed-forward networks and gated sum (Eq. 1), as one
// operator. It processes a block of one expert's rows at a time, in cache.
#include "../experts.h"

#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../implement.h"
#include "backward_schedule.h"
#include "block_scheduler.h"
#include "empty_rows.h"
#include "expert_activations.h"
#include "expert_backward.h"
#include "expert_network.h"
#include "expert_rows.h"
#include "parameter_gradients.h"
#include "slots.h"

namespace moe_ext::cpu {
namespace {

template <typename scalar_t>
std::vector<scalar_t*> data_of(at::TensorList tensors) {
  std::vector<scalar_t*> data;
  for (const Tensor& tensor : tensors) data.push_back(tensor.mutable_data_ptr<scalar_t>());
  return data;
}

// Computes the output rows, a tensor [num_rows, columns of the last layer].
template <typename scalar_t>
void forward(const ExpertNetwork<scalar_t>& network, const ExpertRows<scalar_t>& expert_rows,
             at::TensorList hidden, const Tensor& rows) {
  using Network = ExpertNetwork<scalar_t>;
  using acc_t = typename Network::acc_t;
  const int64_t last = network.num_layers() - 1, width = network.columns(last);
  auto* rows_data = rows.mutable_data_ptr<scalar_t>();
  const auto hidden_data = data_of<scalar_t>(hidden);
  const bool has_z = !hidden.empty();
  struct Workspace {
    typename Network::Workspace products;
    Activations<scalar_t> activations;
    acc_t* product;
  };
  const auto take = [&](Arena& arena) {
    int64_t widest = Network::kSame ? 0 : width;  // of the products in memory of their own
    for (int64_t l = 0; l < last; ++l) {
      if (Activations<scalar_t>::needs_product(network, l, has_z)) {
        widest = std::max(widest, network.columns(l));
      }
    }
    const int64_t num_rows = expert_rows.most_in_block();
    return Workspace{{arena, network, num_rows, /*rows_of_expert=*/0},
                     {arena, network, expert_rows, /*has_z=*/false},
                     arena.take<acc_t>(num_rows * widest)};
  };
  const auto& blocks = expert_rows.blocks();
  for_each_task(static_cast<int64_t>(blocks.size()), /*progress=*/nullptr,
                num_threads_for(expert_rows.count() * network.flops_per_row()), take,
                [&](int64_t task, const Workspace& workspace) {
                  const Block& block = blocks[task];
                  if (block.num_rows == 0) return;
                  Activations<scalar_t> a = workspace.activations;
                  a.take_rows(block, network, expert_rows, hidden_data);
                  a.compute_hidden(block, network, workspace.products,
                                   {workspace.product, workspace.product});
                  scalar_t* out = rows_data + block.first_row * width;
                  Epilogue<scalar_t> epilogue;
                  if (const Block* next = expert_rows.after(block)) {
                    epilogue.next_b = network.weight(next->expert, 0);
                  }
                  if constexpr (Network::kSame) {
                    network.linear(block, last, a.input(last), out, workspace.products, epilogue);
                  } else {
                    const auto* wide = static_cast<const acc_t*>(workspace.product);
                    const auto round = [&](const Region& region) {
                      vectorized<ConvertRegion>(wide, region, width, out);
                    };
                    epilogue.run = round;
                    network.linear(block, last, a.input(last), workspace.product,
                                   workspace.products, epilogue);
                  }
                });
}

// The layers and then, with LoRA, the first and the second matrices of their adapters. The
// gradients are in the order of FeedForward::parameters.
template <typename scalar_t>
std::vector<typename ParameterGradients<scalar_t>::Layer> learned_layers(
    const ExpertNetwork<scalar_t>& network, at::TensorList gradients) {
  std::vector<typename ParameterGradients<scalar_t>::Layer> layers;
  const int64_t num_layers = network.num_layers();
  for (int64_t l = 0; l < num_layers; ++l) {
    layers.push_back({.fan_in = network.fan_in(l),
                      .columns = network.columns(l),
                      .transposed = network.is_transposed(l),
                      .weight = gradients[l],
                      .bias = network.has_bias() ? gradients[num_layers + l] : Tensor()});
  }
  if (!network.has_lora()) return layers;
  const auto lora = gradients.slice(network.has_bias() ? 2 * num_layers : num_layers);
  for (int64_t l = 0; l < num_layers; ++l) {
    layers.push_back({.fan_in = network.fan_in(l),
                      .columns = network.rank(l),
                      .transposed = network.is_lora_a_transposed(l),
                      .weight = lora[l]});
  }
  for (int64_t l = 0; l < num_layers; ++l) {
    layers.push_back({.fan_in = network.rank(l),
                      .columns = network.columns(l),
                      .transposed = network.is_lora_b_transposed(l),
                      .weight = lora[num_layers + l]});
  }
  return layers;
}

// Writes the gradients of the parameters and of the gates; returns the gradient of the input rows.
template <typename scalar_t>
Tensor backward(const ExpertNetwork<scalar_t>& network, const ExpertRows<scalar_t>& expert_rows,
                const Tensor& grad, const Tensor& gates, at::TensorList hidden, bool needs_x,
                at::TensorList grad_parameters, int64_t first_learned, const Tensor& grad_gates) {
  using acc_t = at::opmath_type<scalar_t>;
  using Backward = BlockBackward<scalar_t>;
  Tensor rows = empty_rows({needs_x ? expert_rows.count() : 0, network.fan_in(0)}, grad.options());
  ParameterGradients<scalar_t> parameters(learned_layers(network, grad_parameters),
                                          network.num_experts());
  const int64_t num_threads = num_threads_for(2 * expert_rows.count() * network.flops_per_row());
  BackwardSchedule schedule(expert_rows.blocks(), parameters.num_parts(), num_threads);
  parameters.reserve(schedule);
  const Gradients<scalar_t> gradients{
      .network = network,
      .rows = expert_rows,
      .hidden = data_of<scalar_t>(hidden),
      .grad_out = grad.const_data_ptr<scalar_t>(),
      .gates = gates.defined() ? gates.const_data_ptr<acc_t>() : nullptr,
      .grad_gates = grad_gates.mutable_data_ptr<acc_t>(),
      .grad_rows = needs_x ? rows.mutable_data_ptr<scalar_t>() : nullptr,
      .parameters = parameters,
      .first_learned = first_learned};
  for_each_task(
      schedule.num_tasks(), schedule.progress(), num_threads,
      [&](Arena& arena) { return typename Backward::Workspace(arena, gradients); },
      [&](int64_t task, const typename Backward::Workspace& workspace) {
        schedule.run(
            task,
            [&](const Block& block, const SplitExpert* split) {
              if (block.num_rows == 0) return parameters.write_zeros(block);
              Backward(gradients, block, split, workspace).run();
            },
            [&](const SplitExpert& split, int64_t part) {
              parameters.compute_part(split, part, workspace.parameters);
            });
      });
  return rows;
}

ExpertsOutputs experts_cpu(const Tensor& x, const Routing& routing, const FeedForward& network,
                           bool keep_hidden) {
  const auto* op = network.op();
  check_experts(op, x, routing, network);
  Tensor y;
  std::vector<Tensor> hidden;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "experts", [&] {
    const ExpertNetwork<scalar_t> layers(network, x.size(1));
    const ExpertRows<scalar_t> expert_rows(op, x, routing, layers.num_experts());
    hidden = experts_hidden(empty, x, routing, network, keep_hidden);
    if (!routing.gates) {
      y = experts_output(empty, x, routing, network);
      forward(layers, expert_rows, hidden, y);
      return;
    }
    const Tensor rows =
        empty_rows({expert_rows.count(), layers.columns(layers.num_layers() - 1)}, x.options());
    forward(layers, expert_rows, hidden, rows);
    y = experts_output(empty, x, routing, network);
    sum_over_slots<Cpu>(rows, *expert_rows.slots(), routing.gates->to(accumulate_type(x)), y);
  });
  return {y, hidden};
}

ExpertsGradients experts_backward_cpu(const Tensor& grad_y, const Tensor& x, const Routing& routing,
                                      const FeedForward& network, at::TensorList hidden,
                                      bool needs_x, const c10::List<bool>& needs_parameters) {
  constexpr auto* op = "_experts_backward";
  check_experts_backward(grad_y, x, routing, network, hidden, needs_parameters);
  OptionalTensor gates;
  if (routing.gates) gates = routing.gates->to(accumulate_type(x)).contiguous();
  Tensor grad_x;
  Tensor grad_gates = experts_gradient_of_gates(empty, x, gates);
  const auto grad_parameters = experts_gradients_of(empty, network, needs_parameters);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "experts", [&] {
    const ExpertNetwork<scalar_t> layers(network, x.size(1));
    const ExpertRows<scalar_t> expert_rows(op, x, routing, layers.num_experts());
    std::vector<Tensor> kept;
    for (const Tensor& layer : hidden) kept.push_back(layer.contiguous());
    const Tensor grad_rows =
        backward(layers, expert_rows, grad_y.contiguous(), gates.value_or(Tensor()), kept, needs_x,
                 grad_parameters, first_learned_layer(network, needs_parameters), grad_gates);
    if (needs_x && !routing.inverse) {
      grad_x = grad_rows;
      return;
    }
    grad_x = experts_gradient_of_x(empty, x, needs_x);
    if (needs_x) {
      sum_over_slots<Cpu>(grad_rows, *expert_rows.slots(), /*weights=*/Tensor(), grad_x);
    }
  });
  return {grad_x, gates ? grad_gates.to(routing.gates->scalar_type()) : grad_gates,
          grad_parameters};
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"experts", &moe_ext::experts_of<moe_ext::cpu::experts_cpu>>(m);
  moe_ext::implement<"_experts_backward",
                     &moe_ext::experts_backward_of<moe_ext::cpu::experts_backward_cpu>>(m);
}
