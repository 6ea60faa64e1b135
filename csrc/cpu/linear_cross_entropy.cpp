// The cross-entropy of a linear layer on the CPU. The logits exist only as tiles: some tokens by
// kTileClasses classes.
//
// Two passes go over the tiles. The first computes the log-sum-exp of each token. The second
// computes the gradients P of the logits, and adds P W to the gradient of input and P^T X to the
// gradient of weight. If a tile's exponentials are kept between the passes, only three GEMMs are
// necessary; otherwise the second pass recomputes them. There are two orders:
//
// By tokens: a thread makes both passes over all tiles of a block of tokens. It keeps them if those
// of kMinKept tokens fit into kKeptBytes.
//
// By classes: the threads make each pass over the tiles of at most kMaxTokens tokens together. So
// the weight is packed once, and its gradient is written once, for many tokens. If a tile fits into
// its rows of the gradient of weight, it is kept there.
//
// A token's results do not depend on the order or on other tokens. The gradients of weight and bias
// are summed over the blocks in order.
#include "../linear_cross_entropy.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "../implement.h"
#include "arena.h"
#include "block_scheduler.h"
#include "class_tiles.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "parallel.h"
#include "progress.h"
#include "vectorize.h"

namespace moe_ext::cpu {
namespace {

// The kept tiles of a thread, and the fewest tokens for which keeping them is faster.
constexpr int64_t kKeptBytes = 7 << 20, kMinKept = 48;

// By tokens: the limits of a block's tokens. With few tokens, reading and packing the weight takes
// long. A tile stays in the second cache level. There are about kMinBlocks blocks for the threads.
constexpr int64_t kMinBlockTokens = 48, kMaxBlockTokens = 192, kMinBlocks = 8;

// By classes: the most tokens that share a packed tile of the weight. One thread at a time adds to
// the gradient of input of kPartTokens tokens.
constexpr int64_t kMaxTokens = 640, kPartTokens = 128;

// Tokens are taken in multiples of this, which fill the tiles of the GEMM.
constexpr int64_t kTokensMultiple = 6;

// The gradients that are computed; a gradient that is not needed is null.
template <typename acc_t>
struct Gradients {
  explicit Gradients(const std::vector<Tensor>& tensors)
      : input(data(tensors[0])), weight(data(tensors[1])), bias(data(tensors[2])) {}

  bool any() const { return input != nullptr || of_classes(); }
  bool of_classes() const { return weight != nullptr || bias != nullptr; }

  acc_t *input, *weight, *bias;

 private:
  static acc_t* data(const Tensor& tensor) {
    return tensor.numel() > 0 ? tensor.mutable_data_ptr<acc_t>() : nullptr;
  }
};

// The parts of `tokens`, about equal and of at most `most` tokens.
inline std::vector<Tokens> split(Tokens tokens, int64_t most) {
  const int64_t num_parts = at::ceil_div(tokens.count, most);
  std::vector<Tokens> parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    const int64_t begin = p * tokens.count / num_parts, end = (p + 1) * tokens.count / num_parts;
    parts.push_back({.first = tokens.first + begin, .count = end - begin});
  }
  return parts;
}

template <typename scalar_t>
class LinearCrossEntropy {
 public:
  using acc_t = at::opmath_type<scalar_t>;
  using p_t = typename ClassTiles<scalar_t>::p_t;
  using Workspace = typename ClassTiles<scalar_t>::Workspace;

  // `losses` and `new_lse` are outputs, or null. `lse` may be new_lse; `grad` is dL/dloss of each
  // token.
  LinearCrossEntropy(const ClassTiles<scalar_t>& tiles, acc_t* losses, acc_t* new_lse,
                     const acc_t* lse, const std::vector<acc_t>& grad,
                     const std::vector<Tensor>& gradients)
      : tiles_(tiles),
        losses_(losses),
        new_lse_(new_lse),
        lse_(lse),
        grad_(grad.data()),
        gradients_(gradients) {}

  // Computes the losses and log-sum-exps that are not null, then the gradients that are not empty.
  void run() {
    if (tiles_.num_tokens == 0 || !(sums() || gradients_.any())) return;
    const int64_t fit = kKeptBytes / bytes(tiles_.kept_size(tiles_.num_classes));
    const int64_t kept = std::min(fit / kTokensMultiple * kTokensMultiple, kMaxBlockTokens);
    const bool fit_at_once = tiles_.num_tokens <= kMaxTokens && keeps_in_weight(tiles_.num_tokens);
    if (kept < kMinKept || fit_at_once) {
      by_classes();
    } else {
      by_tokens(kept);
    }
  }

 private:
  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(sizeof(acc_t)); }
  bool sums() const { return losses_ != nullptr; }
  bool keeps() const { return sums() && gradients_.any(); }

  // Whether the rows of the gradient of weight can keep the tiles of some tokens.
  bool keeps_in_weight(int64_t num_tokens) const {
    return keeps() && gradients_.weight != nullptr && tiles_.kept_size(num_tokens) <= tiles_.width;
  }

  void by_tokens(int64_t max_kept) {
    const int64_t most = keeps() ? max_kept : kMaxBlockTokens;
    const int64_t equal =
        at::round_up(at::ceil_div(tiles_.num_tokens, kMinBlocks), kTokensMultiple);
    const auto blocks =
        split({0, tiles_.num_tokens}, std::clamp(equal, std::min(kMinBlockTokens, most), most));
    const int64_t tokens = at::ceil_div(tiles_.num_tokens, static_cast<int64_t>(blocks.size()));
    struct BlockWorkspace {
      acc_t* kept;  // all tiles, or null
      Workspace tile;
    };
    Progress turns(tiles_.num_tiles);
    for_each(
        blocks.size(), gradients_.of_classes() ? &turns : nullptr,
        [&](Arena& arena) {
          const int64_t kept_size = tiles_.num_tiles * kept_size_of_tile(tokens);
          acc_t* const kept = keeps() ? arena.take<acc_t>(kept_size) : nullptr;
          return BlockWorkspace{kept, Workspace(tiles_, tokens, arena)};
        },
        [&](int64_t block, const BlockWorkspace& workspace) {
          block_of_tokens(static_cast<int>(block), blocks[block], turns, workspace.kept,
                          workspace.tile);
        });
  }

  void block_of_tokens(int block, Tokens tokens, Progress& turns, acc_t* kept,
                       const Workspace& workspace) {
    const auto kept_tile = [&](int64_t i) {
      return kept == nullptr ? nullptr : kept + i * kept_size_of_tile(tokens.count);
    };
    std::vector<Sums<acc_t>> of_tiles(tiles_.num_tiles * tokens.count);
    if (sums()) {
      for (int64_t i = 0; i < tiles_.num_tiles; ++i) {
        sum_tile(tokens, i, workspace, kept_tile(i), of_tiles);
      }
      finish(tokens, of_tiles);
    }
    if (!gradients_.any()) return;
    const auto of_logits = tiles_.logit_gradients(tokens, lse_, grad_);
    for (int64_t i = 0; i < tiles_.num_tiles; ++i) {
      const Classes classes = tiles_.tile(i);
      const p_t* p = differentiate_tile(tokens, i, workspace, kept_tile(i), of_tiles, of_logits);
      if (gradients_.input != nullptr) {
        tiles_.add_to_input(tokens, classes, p, added(i), gradients_.input, workspace);
      }
      if (!gradients_.of_classes()) continue;
      turns.in_turn(i, block, [&] {
        tiles_.add_to_weight(tokens, classes, p, added(block), gradients_.weight, gradients_.bias,
                             workspace);
      });
    }
  }

  void by_classes() {
    const auto blocks = split({0, tiles_.num_tokens}, kMaxTokens);
    for (size_t b = 0; b < blocks.size(); ++b) {
      // Only the first block finds the memory of the gradient of weight unused.
      acc_t* kept = b == 0 && keeps_in_weight(blocks[b].count) ? gradients_.weight : nullptr;
      std::vector<Sums<acc_t>> of_tiles(tiles_.num_tiles * blocks[b].count);
      if (sums()) sum_by_classes(blocks[b], kept, of_tiles);
      if (gradients_.any()) {
        differentiate_by_classes(static_cast<int>(b), blocks[b], kept, of_tiles);
      }
    }
  }

  // Returns the part of the gradient of weight that keeps a tile, or null.
  acc_t* kept_in_weight(acc_t* kept, int64_t tile) const {
    return kept == nullptr ? nullptr : kept + tiles_.tile(tile).first * tiles_.width;
  }

  void sum_by_classes(Tokens tokens, acc_t* kept, std::vector<Sums<acc_t>>& of_tiles) {
    for_each(tiles_.num_tiles, nullptr, workspace_of(tokens),
             [&](int64_t i, const Workspace& workspace) {
               sum_tile(tokens, i, workspace, kept_in_weight(kept, i), of_tiles);
             });
    finish(tokens, of_tiles);
  }

  void differentiate_by_classes(int block, Tokens tokens, acc_t* kept,
                                std::vector<Sums<acc_t>>& of_tiles) {
    const auto of_logits = tiles_.logit_gradients(tokens, lse_, grad_);
    const auto parts = split(tokens, kPartTokens);
    Progress turns(static_cast<int64_t>(parts.size()));
    for_each(tiles_.num_tiles, gradients_.input != nullptr ? &turns : nullptr, workspace_of(tokens),
             [&](int64_t i, const Workspace& workspace) {
               const Classes classes = tiles_.tile(i);
               const p_t* p = differentiate_tile(tokens, i, workspace, kept_in_weight(kept, i),
                                                 of_tiles, of_logits);
               if (gradients_.of_classes()) {
                 tiles_.add_to_weight(tokens, classes, p, added(block), gradients_.weight,
                                      gradients_.bias, workspace);
               }
               if (gradients_.input == nullptr) return;
               for (size_t part = 0; part < parts.size(); ++part) {
                 const p_t* of_part = p + (parts[part].first - tokens.first) * classes.count;
                 turns.in_turn(part, static_cast<int>(i), [&] {
                   tiles_.add_to_input(parts[part], classes, of_part, added(i), gradients_.input,
                                       workspace);
                 });
               }
             });
  }

  // The first share of a sum replaces what was there.
  static Write added(int64_t index) { return index == 0 ? Write::kReplace : Write::kAdd; }

  int64_t kept_size_of_tile(int64_t tokens) const {
    return tiles_.kept_size(tokens * tiles_.max_classes());
  }

  // Returns the function that takes the workspace of the tiles of some tokens.
  auto workspace_of(Tokens tokens) const {
    return [=, this](Arena& arena) { return Workspace(tiles_, tokens.count, arena); };
  }

  // The first pass of a tile. `kept` may be null.
  void sum_tile(Tokens tokens, int64_t tile, const Workspace& workspace, acc_t* kept,
                std::vector<Sums<acc_t>>& of_tiles) const {
    const Classes classes = tiles_.tile(tile);
    tiles_.compute_logits(tokens, classes, workspace);
    tiles_.sum(tokens, classes, workspace.tile, kept, of_tiles.data() + tile * tokens.count);
  }

  // The second pass of a tile; returns P. Recomputes the logits that sum() did not keep.
  const p_t* differentiate_tile(Tokens tokens, int64_t tile, const Workspace& workspace,
                                acc_t* kept, std::vector<Sums<acc_t>>& of_tiles,
                                const std::vector<math::LogitGradient<acc_t>>& of_logits) const {
    if (kept == nullptr) {
      kept = workspace.kept;
      sum_tile(tokens, tile, workspace, kept, of_tiles);
    }
    auto* p = reinterpret_cast<p_t*>(workspace.tile);
    tiles_.differentiate(tokens, tiles_.tile(tile), kept, of_tiles.data() + tile * tokens.count,
                         of_logits.data(), p);
    return p;
  }

  // Computes losses and log-sum-exps from the sums of all tiles.
  void finish(Tokens tokens, const std::vector<Sums<acc_t>>& of_tiles) const {
    std::vector<Sums<acc_t>> sums(tokens.count);
    for (int64_t i = 0; i < tiles_.num_tiles; ++i) {
      vectorized<AddSums>(of_tiles.data() + i * tokens.count, tokens.count, sums.data());
    }
    tiles_.finish(tokens, sums.data(), losses_, new_lse_);
  }

  template <typename Take, typename Body>
  void for_each(int64_t num_tasks, Progress* progress, const Take& take, const Body& body) const {
    const int64_t flops = 2 * tiles_.num_tokens * tiles_.width * tiles_.num_classes;
    for_each_task(num_tasks, progress, num_threads_for(flops), take, body);
  }

  const ClassTiles<scalar_t>& tiles_;
  acc_t* const losses_;
  acc_t* const new_lse_;
  const acc_t* const lse_;
  const acc_t* const grad_;
  const Gradients<acc_t> gradients_;
};

struct Total {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* values, int64_t size, acc_t* total) {
    *total = sum(values, size);
  }
};

struct ScaledCopy {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(acc_t scale, const acc_t* from, int64_t size, scalar_t* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<scalar_t>(scale * from[i]);
  }
};

LinearCrossEntropyOutputs linear_cross_entropy_cpu(const Classifier& classifier,
                                                   const LossOptions& options,
                                                   const c10::List<bool>& keep_gradients) {
  constexpr auto op = "linear_cross_entropy";
  check_linear_cross_entropy(op, classifier, options, "keep_gradients", keep_gradients);
  LinearCrossEntropyOutputs outputs;
  const auto type = classifier.input.scalar_type();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, op, [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const ClassTiles<scalar_t> tiles(op, classifier, options);
    outputs = linear_cross_entropy_outputs(empty, classifier, options, keep_gradients);
    const auto& [loss, lse, gradients] = outputs;
    const Tensor losses = options.reduces() ? empty_of(empty, lse) : loss;
    auto* each = losses.mutable_data_ptr<acc_t>();
    auto* sums = lse.mutable_data_ptr<acc_t>();
    const acc_t one = 1;
    const auto grad =
        options.reduces() ? tiles.grad_of_tokens(options, &one) : std::vector<acc_t>();
    LinearCrossEntropy<scalar_t>(tiles, each, sums, sums, grad, gradients).run();
    if (tiles.num_tokens == 0) {
      for (const Tensor& gradient : gradients) gradient.zero_();
    }
    if (!options.reduces()) return;
    auto* total = loss.mutable_data_ptr<acc_t>();
    vectorized<Total>(static_cast<const acc_t*>(each), tiles.num_tokens, total);
    *total /= tiles.divisor(options);
  });
  return outputs;
}

std::vector<Tensor> linear_cross_entropy_backward_cpu(const Tensor& grad_loss,
                                                      const Classifier& classifier,
                                                      const LossOptions& options, const Tensor& lse,
                                                      at::TensorList gradients,
                                                      const c10::List<bool>& needs) {
  constexpr auto op = "_linear_cross_entropy_backward";
  check_linear_cross_entropy_backward(grad_loss, classifier, options, lse, gradients, needs);
  const auto type = classifier.input.scalar_type();
  std::vector<Tensor> results;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, op, [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const Tensor grads = grad_loss.contiguous();
    const auto* grad = grads.const_data_ptr<acc_t>();
    if (!gradients.empty()) {
      results = linear_cross_entropy_gradients(empty, classifier, needs);
      for (size_t i = 0; i < results.size(); ++i) {
        if (results[i].numel() == 0) continue;
        const Tensor kept = gradients[i].contiguous();
        const auto* from = kept.const_data_ptr<acc_t>();
        const auto copy = [&](auto* to) {
          parallel_for(kept.numel(), 2, [&](int64_t begin, int64_t end) {
            vectorized<ScaledCopy>(*grad, from + begin, end - begin, to + begin);
          });
        };
        if (results[i].scalar_type() == type) {
          copy(results[i].mutable_data_ptr<scalar_t>());
        } else {
          copy(results[i].mutable_data_ptr<acc_t>());
        }
      }
      return;
    }
    const ClassTiles<scalar_t> tiles(op, classifier, options);
    results = linear_cross_entropy_gradients(empty, classifier, needs, accumulate_type(grad_loss));
    const Tensor sums = lse.contiguous();
    LinearCrossEntropy<scalar_t>(tiles, nullptr, nullptr, sums.const_data_ptr<acc_t>(),
                                 tiles.grad_of_tokens(options, grad), results)
        .run();
    if (tiles.num_tokens == 0) {
      for (const Tensor& result : results) result.zero_();
    }
    convert_gradients(classifier, results);
  });
  return results;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  moe_ext::implement<"linear_cross_entropy",
                     &moe_ext::linear_cross_entropy_of<moe_ext::cpu::linear_cross_entropy_cpu>>(m);
  moe_ext::implement<
      "_linear_cross_entropy_backward",
      &moe_ext::linear_cross_entropy_backward_of<moe_ext::cpu::linear_cross_entropy_backward_cpu>>(
      m);
}
