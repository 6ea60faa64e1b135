// The experts on the CPU: gather of the tokens, feed-forward networks and gated sum (Eq. 1), as one
// operator. It processes a block of one expert's rows at a time, in cache.
//
// A layer of an expert computes Z = A W + b; the activation of Z is the input A of the next layer.
// Backward, with P = dL/dA of the last layer before the gates are applied:
//   dG = <P, A> + <dy, b>. This does not need the expert's output, so it is not saved.
//   dW = A^T dZ, db = sum of the rows of dZ, dA = dZ W^T, dZ' = dA * activation'(Z').
#include "../experts.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../implement.h"
#include "backward_schedule.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "gemm/gemm.h"
#include "gemm/integer.h"
#include "parameter_gradients.h"
#include "slots.h"
#include "vectorize.h"
#include "workspace.h"

namespace moe_ext::cpu {
namespace {

// State that forward and backward share: the layers, the blocks, and the source of the rows.
template <typename scalar_t>
class Experts {
 public:
  using acc_t = at::opmath_type<scalar_t>;
  static constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;

  Experts(const char* op, const Tensor& x, const Routing& routing, const FeedForward& network)
      : x_(x.contiguous()) {
    math::with_activation(network.activation, network.activation_args, [&](auto function) {
      interleaved = function.kInterleaved;
      const auto values = [function](const auto* z, Region region, int64_t width, scalar_t* out) {
        vectorized<Activate>(function, z, region, width, out);
      };
      activate = values;
      activate_rounded = values;
      activate_backward = [function](const scalar_t* z, const acc_t* grad, Region region,
                                     int64_t width, acc_t* grad_z) {
        vectorized<ActivateBackward>(function, z, grad, region, width, grad_z);
      };
    });
    if (routing.inverse) {
      slots_.emplace(op, *routing.inverse, routing.token_offsets);
      token_of_.resize(slots_->num_slots());
      slot_of_.resize(slots_->num_slots());
      slots_->for_tokens(1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t slot = slots_->begin(t); slot < slots_->end(t); ++slot) {
            token_of_[slots_->row(slot)] = t;
            slot_of_[slots_->row(slot)] = slot;
          }
        }
      });
    }
    num_rows_ = slots_ ? slots_->num_slots() : x.size(0);
    if (routing.offsets) {
      offsets_ = contiguous_index(*routing.offsets);
      check_offsets(op, "offsets", offsets_, num_rows_);
    }
    integer_ = network.packed && network.packed->is_integer();
    layouts_ = packed_layouts(network, x.size(1));
    for (const Tensor& weight : network.weights) {
      weights_.push_back(layouts_.empty() ? in_known_layout(weight) : weight.contiguous());
      transposed_.push_back(layouts_.empty() && moe_ext::is_transposed(weight));
    }
    for (int64_t l = 0; l < num_layers(); ++l) {
      widest_ = std::max({widest_, fan_in(l), columns(l)});
      flops_per_row_ += 2 * fan_in(l) * columns(l);
    }
    for (const Tensor& bias : network.biases) biases_.push_back(readable_bias(bias));
    for (size_t l = 0; l < network.lora.a.size(); ++l) {
      lora_.push_back({.a = readable_lora(network.lora.a[l]),
                       .b = readable_lora(network.lora.b[l]),
                       .scale = static_cast<acc_t>(network.lora.scales[l])});
      highest_rank_ = std::max(highest_rank_, rank(l));
      flops_per_row_ += 2 * rank(l) * (fan_in(l) + columns(l));
    }
    widest_ = std::max(widest_, highest_rank_);
    blocks_ = split_into_blocks(offsets_, num_experts(), num_rows_);
    int64_t rows = 0;  // of an expert
    for (const Block& block : blocks_) {
      most_rows_ = std::max(most_rows_, block.num_rows);
      rows = block.index == 0 ? block.num_rows : rows + block.num_rows;
      most_rows_of_expert_ = std::max(most_rows_of_expert_, rows);
    }
  }

  const std::vector<Block>& blocks() const { return blocks_; }
  const std::optional<Slots>& slots() const { return slots_; }
  int64_t num_experts() const { return weights_[0].size(0); }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_layers() const { return static_cast<int64_t>(weights_.size()); }
  bool has_bias() const { return !biases_.empty(); }
  bool has_lora() const { return !lora_.empty(); }
  int64_t fan_in(int64_t layer) const {
    return layouts_.empty() ? weights_[layer].size(1) : layouts_[layer].inputs;
  }
  int64_t columns(int64_t layer) const {
    return layouts_.empty() ? weights_[layer].size(2) : layouts_[layer].outputs;
  }
  int64_t token_of(int64_t row) const { return token_of_[row]; }
  int64_t slot_of(int64_t row) const { return slot_of_[row]; }
  int64_t flops() const { return num_rows_ * flops_per_row_; }
  int64_t widest() const { return widest_; }
  int64_t highest_rank() const { return highest_rank_; }

  // Workspace sizes: for a block's rows of `width` elements of T, and for the GEMMs.
  template <typename T>
  int64_t rows_size(int64_t width) const {
    return space_of<T, acc_t>(most_rows_ * width);
  }
  int64_t gemm_size(bool backward) const {
    int64_t size = gemm_workspace_size<scalar_t>(most_rows_, widest_, widest_);
    if (backward) {
      size = std::max(size, gemm_workspace_size<scalar_t>(widest_, widest_, most_rows_of_expert_));
    }
    if (integer_) size = std::max(size, integer_workspace_size(most_rows_, widest_));
    return whole_lines(size);
  }

  // Takes memory for the gradients of the parameters; the GEMMs have theirs.
  typename ParameterGradients<scalar_t>::Workspace parameters_workspace(acc_t* gemm,
                                                                        acc_t*& workspace) const {
    acc_t* sums = take<acc_t>(workspace, ParameterGradients<scalar_t>::sums_size(widest_));
    return {.gemm = gemm, .sums = sums, .group = take<acc_t>(workspace, widest_)};
  }

  // The workspace size of parameters_workspace.
  int64_t parameters_size() const {
    return whole_lines(ParameterGradients<scalar_t>::sums_size(widest_)) + whole_lines(widest_);
  }

  // Returns whether the weights of a layer are stored as [columns, fan_in].
  bool is_transposed(int64_t layer) const { return transposed_[layer]; }

  // Returns an expert's weight, [fan_in, columns].
  Operand<scalar_t> weight(int64_t expert, int64_t layer) const {
    if (!layouts_.empty()) {
      const PackedLayout& layout = layouts_[layer];
      return packed<scalar_t>(
          layout, weights_[layer].template const_data_ptr<uint8_t>() + expert * layout.bytes());
    }
    const scalar_t* data = weights_[layer].template const_data_ptr<scalar_t>() +
                           expert * fan_in(layer) * columns(layer);
    return is_transposed(layer) ? transposed(data, fan_in(layer)) : plain(data, columns(layer));
  }

  // The rank of the low-rank adapter of a layer (see LoraLayers), 0 without one; and its matrices.
  int64_t rank(int64_t layer) const {
    return lora_.empty() || lora_[layer].a.dim() == 1 ? 0 : lora_[layer].a.size(2);
  }
  Operand<scalar_t> lora_a(int64_t expert, int64_t layer) const {
    return matrix_of(lora_[layer].a, expert);
  }
  Operand<scalar_t> lora_b(int64_t expert, int64_t layer) const {
    return matrix_of(lora_[layer].b, expert);
  }
  bool is_lora_a_transposed(int64_t layer) const { return moe_ext::is_transposed(lora_[layer].a); }
  bool is_lora_b_transposed(int64_t layer) const { return moe_ext::is_transposed(lora_[layer].b); }

  // Memory for the inputs of the second matrix of an adapter, [num_rows, rank]: summed, and rounded
  // to scalar_t.
  struct LoraRows {
    acc_t* sums;
    scalar_t* rounded;
  };
  LoraRows lora_rows(int64_t num_rows, acc_t*& workspace) const {
    acc_t* sums = take<acc_t>(workspace, num_rows * highest_rank_);
    if constexpr (kSame) {
      return {sums, sums};
    } else {
      return {sums, take<scalar_t>(workspace, num_rows * highest_rank_)};
    }
  }
  int64_t lora_rows_size() const {
    return rows_size<acc_t>(highest_rank_) + (kSame ? 0 : rows_size<scalar_t>(highest_rank_));
  }

  // Computes scale (in a), rounded to scalar_t.
  void lora_input(const Block& block, int64_t layer, const scalar_t* in, const LoraRows& to,
                  acc_t* space) const {
    gemm<scalar_t>(block.num_rows, rank(layer), fan_in(layer), plain(in, fan_in(layer)),
                   lora_a(block.expert, layer), Write::kReplace, to.sums, space);
    const int64_t size = block.num_rows * rank(layer);
    vectorized<Scale>(lora_[layer].scale, size, to.sums);
    if constexpr (!kSame) {
      vectorized<Convert>(static_cast<const acc_t*>(to.sums), size, to.rounded);
    }
  }

  // Computes the gradient of in a from grad = dL/dZ.
  void lora_gradient(const Block& block, int64_t layer, const acc_t* grad, acc_t* to,
                     acc_t* space) const {
    gemm<scalar_t>(block.num_rows, rank(layer), columns(layer), plain(grad, columns(layer)),
                   transpose(lora_b(block.expert, layer)), Write::kReplace, to, space);
    vectorized<Scale>(lora_[layer].scale, block.num_rows * rank(layer), to);
  }

  const scalar_t* bias(int64_t expert, int64_t layer) const {
    return biases_[layer].template const_data_ptr<scalar_t>() + expert * columns(layer);
  }

  // Copies the rows of a block; `data` holds tokens if by_token, else rows.
  template <typename to_t>
  void copy_rows(const Block& block, const scalar_t* data, bool by_token, int64_t width,
                 to_t* to) const {
    for (int64_t r = 0; r < block.num_rows; ++r) {
      const int64_t row = block.first_row + r;
      vectorized<Convert>(data + (by_token ? token_of(row) : row) * width, width, to + r * width);
    }
  }

  // Returns the rows of a block; copies them only if by_token.
  const scalar_t* gather(const Block& block, const scalar_t* data, bool by_token, int64_t width,
                         scalar_t* space) const {
    if (!by_token) return data + block.first_row * width;
    copy_rows(block, data, by_token, width, space);
    return space;
  }

  // The rows and hidden layers of a block. All are rounded to scalar_t, whether saved or
  // recomputed, so the gradients are bitwise identical.
  struct Activations {
    const scalar_t* first;               // [num_rows, fan_in], the input of the first layer
    c10::SmallVector<scalar_t*, 4> z;    // [num_rows, columns] of each hidden layer, or null
    c10::SmallVector<scalar_t*, 4> out;  // the activations of z, the next layer's input
    LoraRows lora;
    acc_t* gemm_workspace;

    const scalar_t* input(int64_t layer) const { return layer == 0 ? first : out[layer - 1]; }
  };

  // Gathers the rows and takes memory for the hidden layers; z is in `hidden` if that is not empty.
  // Backward needs z.
  Activations places(const Block& block, const std::vector<scalar_t*>& hidden, bool backward,
                     acc_t*& workspace) const {
    Activations a;
    a.gemm_workspace = take<acc_t>(workspace, gemm_size(backward));
    a.lora = lora_rows(block.num_rows, workspace);
    const int64_t num_copied = slots_ ? block.num_rows : 0;
    a.first = gather(block, x_.template const_data_ptr<scalar_t>(), slots_.has_value(), fan_in(0),
                     take<scalar_t>(workspace, num_copied * fan_in(0)));
    for (int64_t l = 0; l + 1 < num_layers(); ++l) {
      scalar_t* z = nullptr;
      if (!hidden.empty()) {
        z = hidden[l] + block.first_row * columns(l);
      } else if (backward) {
        z = take<scalar_t>(workspace, block.num_rows * columns(l));
      }
      a.z.push_back(z);
      a.out.push_back(take<scalar_t>(workspace, block.num_rows * fan_in(l + 1)));
    }
    return a;
  }

  // The workspace size of `places`.
  int64_t places_size(bool saved, bool backward) const {
    int64_t size =
        gemm_size(backward) + lora_rows_size() + (slots_ ? rows_size<scalar_t>(fan_in(0)) : 0);
    for (int64_t l = 0; l + 1 < num_layers(); ++l) {
      size += rows_size<scalar_t>(fan_in(l + 1));
      if (backward && !saved) size += rows_size<scalar_t>(columns(l));
    }
    return size;
  }

  // Computes the hidden layers into the memory of `a`. The workspace is free again afterwards.
  void compute_hidden(const Block& block, const Activations& a, acc_t* workspace) const {
    for (int64_t l = 0; l + 1 < num_layers(); ++l) {
      const int64_t width = fan_in(l + 1);
      scalar_t *z = a.z[l], *out = a.out[l];
      acc_t* product = workspace;
      if constexpr (kSame) {
        if (!needs_product(l, z != nullptr)) product = z != nullptr ? z : out;
      }
      linear(block, l, a, product, [&](const Region& region) {
        const auto* wide = static_cast<const acc_t*>(product);
        if (!kSame && z != nullptr) vectorized<ConvertRegion>(wide, region, columns(l), z);
        activate(wide, region, width, out);
      });
    }
  }

  // The workspace size of compute_hidden.
  int64_t hidden_size(bool has_z) const {
    int64_t size = 0;
    for (int64_t l = 0; l + 1 < num_layers(); ++l) {
      if (needs_product(l, has_z)) size = std::max(size, rows_size<acc_t>(columns(l)));
    }
    return size;
  }

  // Computes product = in W + scale (in a) b + bias, [num_rows, columns], for the input of the
  // layer in `activations`; `epilogue` is the epilogue of the last GEMM.
  void linear(const Block& block, int64_t layer, const Activations& activations, acc_t* product,
              typename Epilogue<scalar_t>::Body epilogue) const {
    const scalar_t* in = activations.input(layer);
    acc_t* space = activations.gemm_workspace;
    if (has_bias()) {
      for (int64_t r = 0; r < block.num_rows; ++r) {
        vectorized<Convert>(bias(block.expert, layer), columns(layer),
                            product + r * columns(layer));
      }
    }
    Write write = has_bias() ? Write::kAdd : Write::kReplace;
    if (rank(layer) > 0) {
      const LoraRows& low = activations.lora;
      lora_input(block, layer, in, low, space);
      gemm<scalar_t>(block.num_rows, columns(layer), rank(layer),
                     plain(static_cast<const scalar_t*>(low.rounded), rank(layer)),
                     lora_b(block.expert, layer), write, product, space);
      write = Write::kAdd;
    }
    if constexpr (!std::is_same_v<scalar_t, double>) {
      if (integer_) {
        integer_gemm(block.num_rows, layouts_[layer], weight(block.expert, layer).panels, in,
                     /*add=*/write == Write::kAdd, product, space);
        if (epilogue) epilogue({0, block.num_rows, 0, columns(layer)});
        return;
      }
    }
    Epilogue<scalar_t> after_gemm{.run = epilogue};
    if (layer + 1 < num_layers()) {
      after_gemm.next_b = weight(block.expert, layer + 1);
    } else if (const Block* next = after(block)) {
      after_gemm.next_b = weight(next->expert, 0);
    }
    gemm<scalar_t>(block.num_rows, columns(layer), fan_in(layer), plain(in, fan_in(layer)),
                   weight(block.expert, layer), write, product, space, after_gemm);
  }

  // Returns the next block, or null after the last one.
  const Block* after(const Block& block) const {
    return &block == &blocks_.back() ? nullptr : &block + 1;
  }

  // Prefetches a region of z.
  static void fetch(const scalar_t* z, const Region& region, int64_t width) {
    constexpr int64_t kLine = 64 / sizeof(scalar_t);
    for (int64_t r = region.row; r < region.row + region.num_rows; ++r) {
      for (int64_t i = 0; i < region.num_columns; i += kLine) {
        __builtin_prefetch(z + r * width + region.column + i);
      }
    }
  }

  // Activate and ActivateBackward for the activation in use.
  std::function<void(const acc_t* z, Region region, int64_t width, scalar_t* out)> activate;
  std::function<void(const scalar_t* z, Region region, int64_t width, scalar_t* out)>
      activate_rounded;
  std::function<void(const scalar_t* z, const acc_t* grad, Region region, int64_t width,
                     acc_t* grad_z)>
      activate_backward;
  bool interleaved = false;  // see math/activation.h

 private:
  // Returns whether the product of a hidden layer has memory of its own: neither z nor the
  // activations can hold it.
  bool needs_product(int64_t layer, bool has_z) const {
    return !kSame || (!has_z && columns(layer) != fan_in(layer + 1));
  }

  struct Lora {
    Tensor a, b;
    acc_t scale;
  };

  static Operand<scalar_t> matrix_of(const Tensor& matrices, int64_t expert) {
    const int64_t rows = matrices.size(1), columns = matrices.size(2);
    const scalar_t* data = matrices.template const_data_ptr<scalar_t>() + expert * rows * columns;
    return moe_ext::is_transposed(matrices) ? transposed(data, rows) : plain(data, columns);
  }

  Tensor x_;
  std::optional<Slots> slots_;
  std::vector<int64_t> token_of_, slot_of_;  // of each row
  Tensor offsets_;
  std::vector<Tensor> weights_, biases_;
  std::vector<Lora> lora_;  // of each layer, or empty
  int64_t highest_rank_ = 0;
  std::vector<PackedLayout> layouts_;  // of packed weights
  bool integer_ = false;               // whether the arithmetic is that of integers
  std::vector<bool> transposed_;       // of each layer
  std::vector<Block> blocks_;
  int64_t num_rows_ = 0;
  int64_t widest_ = 0, flops_per_row_ = 0;
  int64_t most_rows_ = 0, most_rows_of_expert_ = 0;  // of a block, of an expert
};

template <typename scalar_t>
std::vector<scalar_t*> data_of(at::TensorList tensors) {
  std::vector<scalar_t*> data;
  for (const Tensor& tensor : tensors) data.push_back(tensor.mutable_data_ptr<scalar_t>());
  return data;
}

// Computes the output rows, a tensor [num_rows, columns of the last layer].
template <typename scalar_t>
void forward(const Experts<scalar_t>& experts, at::TensorList hidden, const Tensor& rows) {
  using acc_t = at::opmath_type<scalar_t>;
  const int64_t last = experts.num_layers() - 1;
  const int64_t width = experts.columns(last);
  auto* rows_data = rows.mutable_data_ptr<scalar_t>();
  const auto hidden_data = data_of<scalar_t>(hidden);
  const bool saved = !hidden.empty();
  const int64_t wide_size =
      std::is_same_v<scalar_t, acc_t> ? 0 : experts.template rows_size<acc_t>(width);
  const int64_t size = experts.places_size(saved, /*backward=*/false) +
                       std::max(experts.hidden_size(/*has_z=*/saved), wide_size);
  const auto& blocks = experts.blocks();
  for_each_task(
      static_cast<int64_t>(blocks.size()), /*progress=*/nullptr, num_threads_for(experts.flops()),
      [size](Arena& arena) { return arena.take<acc_t>(size); },
      [&](int64_t task, acc_t* workspace) {
        const Block& block = blocks[task];
        if (block.num_rows == 0) return;
        const auto a = experts.places(block, hidden_data, /*backward=*/false, workspace);
        experts.compute_hidden(block, a, workspace);
        scalar_t* out = rows_data + block.first_row * width;
        if constexpr (std::is_same_v<scalar_t, acc_t>) {
          experts.linear(block, last, a, out, nullptr);
        } else {
          acc_t* wide = workspace;
          experts.linear(block, last, a, wide, [&](const Region& region) {
            vectorized<ConvertRegion>(static_cast<const acc_t*>(wide), region, width, out);
          });
        }
      });
}

// The inputs and the outputs that the backward passes of all blocks share.
template <typename scalar_t>
struct Gradients {
  using acc_t = at::opmath_type<scalar_t>;

  const Experts<scalar_t>& experts;
  const std::vector<scalar_t*> hidden;  // z of each hidden layer, if saved for backward
  const scalar_t* const grad_out;       // gradient of y, or of the output rows without gates
  const acc_t* const gates;             // for each slot, or null
  acc_t* const grad_gates;
  scalar_t* const grad_rows;  // for the input rows, or null
  const ParameterGradients<scalar_t>& parameters;
  const int64_t first_learned;  // the first layer with a gradient of parameters
};

// The backward pass of a block, from the last layer to the first.
template <typename scalar_t>
class BlockBackward {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  // `split` is the block's expert if that has several blocks, else null.
  BlockBackward(const Gradients<scalar_t>& gradients, const Block& block, const SplitExpert* split,
                acc_t* workspace)
      : gradients_(gradients),
        experts_(gradients.experts),
        block_(block),
        split_(split),
        a_(experts_.places(block, gradients.hidden, /*backward=*/true, workspace)) {
    if (gradients.hidden.empty()) experts_.compute_hidden(block, a_, workspace);
    const Widths widths(gradients);
    const auto rows = [&](int64_t width) { return take<acc_t>(workspace, block.num_rows * width); };
    grad_out_ = rows(widths.grad_out);
    grad_a_ = rows(widths.grad_a);
    for (int parity : {0, 1}) grad_z_[parity] = rows(widths.grad_z[parity]);
    gate_ = rows(widths.gate);
    grad_gate_ = rows(widths.grad_gate);
    grad_lora_ = rows(widths.grad_lora);
    for_parameters_ = experts_.parameters_workspace(a_.gemm_workspace, workspace);
  }

  static int64_t workspace_size(const Gradients<scalar_t>& gradients) {
    const auto& experts = gradients.experts;
    const Widths widths(gradients);
    int64_t size = experts.parameters_size();
    for (int64_t width : {widths.grad_out, widths.grad_a, widths.grad_z[0], widths.grad_z[1],
                          widths.gate, widths.grad_gate, widths.grad_lora}) {
      size += experts.template rows_size<acc_t>(width);
    }
    return experts.places_size(/*saved=*/!gradients.hidden.empty(), /*backward=*/true) +
           std::max(size, experts.hidden_size(/*has_z=*/true));
  }

  void run() const {
    take_output_gradient();
    const acc_t* grad_z = grad_out_;
    for (int64_t l = last_; l >= 0; --l) {
      const bool needs_rest = gradients_.grad_rows != nullptr || l > gradients_.first_learned;
      const bool needs_gates = l == last_ && has_gates();
      const acc_t* grad_before = nullptr;
      if (experts_.rank(l) > 0) {
        experts_.lora_gradient(block_, l, grad_z, grad_lora_, a_.gemm_workspace);
      }
      if (needs_rest || needs_gates) {
        grad_before = input_gradient(l, grad_z);
      } else if (!has_input(l) && needs_input(l)) {
        activate_input(l);
      }
      if (needs_gates) gate_gradient();
      gradients_.parameters.add(block_, split_, l, a_.input(l), grad_z, for_parameters_);
      if (experts_.rank(l) > 0) add_lora_gradients(l, grad_z);
      if (!needs_rest) return;
      grad_z = grad_before;
    }
  }

 private:
  static constexpr bool kSame = Experts<scalar_t>::kSame;

  // The numbers of elements of a row in the arrays of rows; 0 for unused arrays.
  struct Widths {
    int64_t grad_out, grad_a, grad_z[2] = {0, 0}, gate, grad_gate, grad_lora;

    explicit Widths(const Gradients<scalar_t>& gradients) {
      const auto& experts = gradients.experts;
      const bool has_gates = gradients.gates != nullptr;
      grad_out = experts.columns(experts.num_layers() - 1);
      gate = has_gates ? 1 : 0;
      grad_gate = has_gates ? kLanes : 0;
      grad_lora = experts.highest_rank();
      grad_a = kSame && gradients.grad_rows != nullptr ? 0 : experts.fan_in(0);
      for (int64_t l = 1; l < experts.num_layers(); ++l) {
        const int64_t width = experts.fan_in(l), width_z = experts.columns(l - 1);
        if (width_z != width) grad_a = std::max(grad_a, width);
        grad_z[l % 2] = std::max(grad_z[l % 2], width_z);
      }
    }
  };

  bool has_gates() const { return gradients_.gates != nullptr; }

  // Loads the gates and dL/dy for the block's rows; dL/dy is not multiplied by the gates yet.
  void take_output_gradient() const {
    experts_.copy_rows(block_, gradients_.grad_out, has_gates(), experts_.columns(last_),
                       grad_out_);
    if (!has_gates()) return;
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      gate_[r] = gradients_.gates[experts_.slot_of(block_.first_row + r)];
    }
    std::fill_n(grad_gate_, block_.num_rows * kLanes, acc_t(0));
  }

  // Returns whether computing z also computed the input of layer l. In half precision, the
  // activations are always computed from the rounded z, saved or recomputed.
  bool has_input(int64_t l) const { return l == 0 || (kSame && gradients_.hidden.empty()); }

  // The layers of ParameterGradients that are the matrices of the adapter of layer l.
  int64_t lora_a(int64_t l) const { return experts_.num_layers() + l; }
  int64_t lora_b(int64_t l) const { return 2 * experts_.num_layers() + l; }

  // Returns whether a gradient of the parameters of layer l needs the input of the layer.
  bool needs_input(int64_t l) const {
    const auto& parameters = gradients_.parameters;
    return parameters.needs_weight(l) ||
           (experts_.rank(l) > 0 &&
            (parameters.needs_weight(lora_a(l)) || parameters.needs_weight(lora_b(l))));
  }

  void add_lora_gradients(int64_t l, const acc_t* grad_z) const {
    const auto& parameters = gradients_.parameters;
    parameters.add(block_, split_, lora_a(l), a_.input(l), grad_lora_, for_parameters_);
    if (!parameters.needs_weight(lora_b(l))) return;
    experts_.lora_input(block_, l, a_.input(l), a_.lora, a_.gemm_workspace);
    parameters.add(block_, split_, lora_b(l), a_.lora.rounded, grad_z, for_parameters_);
  }

  // Computes the input of layer l, a hidden layer's activations.
  void activate_input(int64_t l) const {
    const Region all{
        .row = 0, .num_rows = block_.num_rows, .column = 0, .num_columns = experts_.columns(l - 1)};
    experts_.activate_rounded(a_.z[l - 1], all, experts_.fan_in(l), a_.out[l - 1]);
  }

  // Takes dL/dZ of layer l, [num_rows, columns]. At l = 0, writes dL/dx. Otherwise returns dL/dZ'
  // of layer l - 1 and computes that layer's activations, unless recomputing z already did. At the
  // last layer, dL/dZ is not multiplied by the gates yet.
  const acc_t* input_gradient(int64_t l, const acc_t* grad_z) const {
    const int64_t width = experts_.fan_in(l), columns = experts_.columns(l);
    const int64_t width_z = l > 0 ? experts_.columns(l - 1) : width;
    const scalar_t* z = l > 0 ? a_.z[l - 1] : nullptr;
    const bool gated_sum = l == last_ && has_gates();
    const bool activated = has_input(l);
    scalar_t* grad_rows = nullptr;
    if (l == 0 && gradients_.grad_rows != nullptr) {
      grad_rows = gradients_.grad_rows + block_.first_row * width;
    }
    acc_t* grad_before = grad_z_[l % 2];
    acc_t* grad_a = l > 0 && width_z == width ? grad_before : grad_a_;
    if constexpr (kSame) {
      if (grad_rows != nullptr) grad_a = grad_rows;
    }
    const auto in_z = [&](Region region) {  // the columns of z that complete the activations
      if (experts_.interleaved) {
        region.column *= 2;
        region.num_columns *= 2;
      } else {
        region.column += width_z - width;  // the second half of a gated z
      }
      return region;
    };
    const auto prefetch = [&](const Region& region) {
      experts_.fetch(z, in_z(region), width_z);
      if (width_z != width && !experts_.interleaved) experts_.fetch(z, region, width_z);
    };
    const auto run = [&](const Region& region) {
      if (!activated) experts_.activate_rounded(z, in_z(region), width, a_.out[l - 1]);
      if (gated_sum) {
        vectorized<DotRegion>(static_cast<const acc_t*>(grad_a), a_.input(l), region, width,
                              grad_gate_);
        vectorized<ScaleRegion>(static_cast<const acc_t*>(gate_), region, width, grad_a);
      }
      if (l > 0) {
        experts_.activate_backward(z, grad_a, region, width, grad_before);
      } else if (!kSame && grad_rows != nullptr) {
        vectorized<ConvertRegion>(static_cast<const acc_t*>(grad_a), region, width, grad_rows);
      }
    };
    Epilogue<scalar_t> epilogue{.run = run};
    if (l > 0) {
      epilogue.prefetch = prefetch;
      epilogue.next_b = transpose(experts_.weight(block_.expert, l - 1));
    } else if (const Block* next = experts_.after(block_)) {
      epilogue.next_b = transpose(experts_.weight(next->expert, last_));
    }
    Write write = Write::kReplace;
    if (const int64_t rank = experts_.rank(l); rank > 0) {
      gemm<scalar_t>(
          block_.num_rows, width, rank, plain(static_cast<const acc_t*>(grad_lora_), rank),
          transpose(experts_.lora_a(block_.expert, l)), write, grad_a, a_.gemm_workspace);
      write = Write::kAdd;
    }
    gemm<scalar_t>(block_.num_rows, width, columns, plain(grad_z, columns),
                   transpose(experts_.weight(block_.expert, l)), write, grad_a, a_.gemm_workspace,
                   epilogue);
    return grad_before;
  }

  // Finishes the gradients of the gates, then multiplies dL/dy by the gates.
  void gate_gradient() const {
    const int64_t columns = experts_.columns(last_);
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      acc_t* grad_gate = gradients_.grad_gates + experts_.slot_of(block_.first_row + r);
      acc_t* dy = grad_out_ + r * columns;
      vectorized<SumOfLanes>(grad_gate_ + r * kLanes, grad_gate);
      if (experts_.has_bias()) {
        acc_t of_bias;
        vectorized<Dot>(static_cast<const acc_t*>(dy), experts_.bias(block_.expert, last_), columns,
                        &of_bias);
        *grad_gate += of_bias;
      }
      vectorized<Scale>(gate_[r], columns, dy);
      const int64_t rank = experts_.rank(last_);
      vectorized<Scale>(gate_[r], rank, grad_lora_ + r * rank);
    }
  }

  const Gradients<scalar_t>& gradients_;
  const Experts<scalar_t>& experts_;
  const Block& block_;
  const SplitExpert* split_;
  const int64_t last_ = experts_.num_layers() - 1;
  const typename Experts<scalar_t>::Activations a_;
  acc_t* grad_out_;   // dL/dy; gate_gradient multiplies it by the gates
  acc_t* grad_a_;     // dL/dA, if it cannot use the memory of dL/dZ
  acc_t* grad_z_[2];  // dL/dZ of a layer and of the layer before it
  acc_t* gate_;       // for each row
  acc_t* grad_gate_;  // kLanes partial sums for each row
  acc_t* grad_lora_;  // the gradient of the rows between the matrices of an adapter
  typename ParameterGradients<scalar_t>::Workspace for_parameters_;
};

// The layers and then, with LoRA, the first and the second matrices of their adapters. The
// gradients are in the order of FeedForward::parameters.
template <typename scalar_t>
std::vector<typename ParameterGradients<scalar_t>::Layer> learned_layers(
    const Experts<scalar_t>& experts, at::TensorList gradients) {
  std::vector<typename ParameterGradients<scalar_t>::Layer> layers;
  const int64_t num_layers = experts.num_layers();
  for (int64_t l = 0; l < num_layers; ++l) {
    layers.push_back({.fan_in = experts.fan_in(l),
                      .columns = experts.columns(l),
                      .transposed = experts.is_transposed(l),
                      .weight = gradients[l],
                      .bias = experts.has_bias() ? gradients[num_layers + l] : Tensor()});
  }
  if (!experts.has_lora()) return layers;
  const auto lora = gradients.slice(experts.has_bias() ? 2 * num_layers : num_layers);
  for (int64_t l = 0; l < num_layers; ++l) {
    layers.push_back({.fan_in = experts.fan_in(l),
                      .columns = experts.rank(l),
                      .transposed = experts.is_lora_a_transposed(l),
                      .weight = lora[l]});
  }
  for (int64_t l = 0; l < num_layers; ++l) {
    layers.push_back({.fan_in = experts.rank(l),
                      .columns = experts.columns(l),
                      .transposed = experts.is_lora_b_transposed(l),
                      .weight = lora[num_layers + l]});
  }
  return layers;
}

// Writes the gradients of the parameters and of the gates; returns the gradient of the input rows.
template <typename scalar_t>
Tensor backward(const Experts<scalar_t>& experts, const Tensor& grad, const Tensor& gates,
                at::TensorList hidden, bool needs_x, at::TensorList grad_parameters,
                int64_t first_learned, const Tensor& grad_gates) {
  using acc_t = at::opmath_type<scalar_t>;
  Tensor rows = empty_rows({needs_x ? experts.num_rows() : 0, experts.fan_in(0)}, grad.options());
  ParameterGradients<scalar_t> parameters(learned_layers(experts, grad_parameters),
                                          experts.num_experts());
  const int64_t flops = 2 * experts.flops(), num_threads = num_threads_for(flops);
  BackwardSchedule schedule(experts.blocks(), parameters.num_parts(), num_threads);
  parameters.reserve(schedule);
  const Gradients<scalar_t> gradients{
      .experts = experts,
      .hidden = data_of<scalar_t>(hidden),
      .grad_out = grad.const_data_ptr<scalar_t>(),
      .gates = gates.defined() ? gates.const_data_ptr<acc_t>() : nullptr,
      .grad_gates = grad_gates.mutable_data_ptr<acc_t>(),
      .grad_rows = needs_x ? rows.mutable_data_ptr<scalar_t>() : nullptr,
      .parameters = parameters,
      .first_learned = first_learned};
  const int64_t size = BlockBackward<scalar_t>::workspace_size(gradients);
  for_each_task(
      schedule.num_tasks(), schedule.progress(), num_threads,
      [size](Arena& arena) { return arena.take<acc_t>(size); },
      [&](int64_t task, acc_t* workspace) {
        schedule.run(
            task,
            [&](const Block& block, const SplitExpert* split) {
              if (block.num_rows == 0) return parameters.write_zeros(block);
              BlockBackward<scalar_t>(gradients, block, split, workspace).run();
            },
            [&](const SplitExpert& split, int64_t part) {
              acc_t* gemm = take<acc_t>(workspace, experts.gemm_size(/*backward=*/true));
              parameters.compute_part(split, part, experts.parameters_workspace(gemm, workspace));
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
    const Experts<scalar_t> experts(op, x, routing, network);
    hidden = experts_hidden(empty, x, routing, network, keep_hidden);
    if (!routing.gates) {
      y = experts_output(empty, x, routing, network);
      forward(experts, hidden, y);
      return;
    }
    const Tensor rows =
        empty_rows({experts.num_rows(), experts.columns(experts.num_layers() - 1)}, x.options());
    forward(experts, hidden, rows);
    y = experts_output(empty, x, routing, network);
    sum_of_rows(rows, *experts.slots(), routing.gates->to(accumulate_type(x)).contiguous(), y);
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
    const Experts<scalar_t> experts(op, x, routing, network);
    std::vector<Tensor> kept;
    for (const Tensor& layer : hidden) kept.push_back(layer.contiguous());
    const Tensor grad_rows =
        backward(experts, grad_y.contiguous(), gates.value_or(Tensor()), kept, needs_x,
                 grad_parameters, first_learned_layer(network, needs_parameters), grad_gates);
    if (needs_x && !routing.inverse) {
      grad_x = grad_rows;
      return;
    }
    grad_x = experts_gradient_of_x(empty, x, needs_x);
    if (needs_x) sum_of_rows(grad_rows, *experts.slots(), /*weights=*/Tensor(), grad_x);
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
