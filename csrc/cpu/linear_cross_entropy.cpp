// The cross-entropy of a linear layer on the CPU. The logits exist only as tiles: a block of tokens
// by kTileClasses classes.
//
// Two passes go over the tiles of a block of tokens. The first computes the log-sum-exp of each
// token. The second turns the logits into their gradients P and adds P W to the gradient of input
// and P^T X to the gradient of weight. In between, a thread keeps the logits of its block, so that
// only three GEMMs are necessary. If the classes are too many for that, or backward comes later,
// the second pass recomputes the logits.
//
// A token's results do not depend on its block. The gradients of weight and bias are summed over
// the blocks in order.
#include "../linear_cross_entropy.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "../math/linear_cross_entropy.h"
#include "block_scheduler.h"
#include "elementwise.h"
#include "empty_rows.h"
#include "gemm/gemm.h"
#include "parallel.h"
#include "vectorize.h"
#include "workspace.h"

namespace moe_ext::cpu {
namespace {

// The classes of a tile; the last tile may have fewer. All sums over the classes are by tile.
constexpr int64_t kTileClasses = 512;

// The limits of a block's tokens. With few tokens, reading and packing the weight takes long. A
// tile stays in the second cache level. There are about kMinBlocks blocks for the threads.
constexpr int64_t kMinTokens = 48, kMaxTokens = 192, kMinBlocks = 8;

// The kept logits of a thread. If fewer than kMinKept tokens fit, recomputing is faster.
constexpr int64_t kKeptBytes = 7 << 20, kMinKept = 48;

// Tokens are taken in multiples of this, which fill the tiles of the GEMM.
constexpr int64_t kTokensMultiple = 6;

// Adds the bias to a tile of products and applies the softcap.
struct Logits {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(acc_t* tile, int64_t num_tokens, int64_t width, const acc_t* bias,
                          const math::Softcap<acc_t>* softcap) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      acc_t* row = tile + t * width;
      if (bias != nullptr) {
        for (int64_t v = 0; v < width; ++v) row[v] += bias[v];
      }
      if (softcap != nullptr) {
        const math::Softcap<acc_t> function = *softcap;
        for (int64_t v = 0; v < width; ++v) row[v] = function.value(row[v]);
      }
    }
  }
};

// What the first pass sums for a token.
template <typename acc_t>
struct Sums {
  acc_t shift = -std::numeric_limits<acc_t>::infinity();  // the largest logit
  acc_t exponentials = 0;                                 // sum of e^(l - shift)
  acc_t logits = 0;
  acc_t target_logit = 0;
};

// Adds a tile to the sums of its tokens.
struct AddTile {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* tile, int64_t num_tokens, int64_t width, bool sums_logits,
                          Sums<acc_t>* sums) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const acc_t* row = tile + t * width;
      Sums<acc_t>& of = sums[t];
      const acc_t largest = std::max(of.shift, largest_of(row, width));
      // Without a finite logit, the difference from the largest one would be NaN.
      const acc_t shift = largest == -std::numeric_limits<acc_t>::infinity() ? acc_t(0) : largest;
      const acc_t sum = sum_of_terms<acc_t>(
          width, [&](int64_t v, acc_t partial) __attribute__((always_inline)) {
            return partial + math::exp(row[v] - shift);
          });
      of.exponentials = of.exponentials * math::exp(of.shift - shift) + sum;
      of.shift = largest;
      if (sums_logits) of.logits += cpu::sum(row, width);
    }
  }

  template <typename acc_t>
  MOE_EXT_KERNEL acc_t largest_of(const acc_t* row, int64_t width) {
    acc_t lane[kLanes];
    std::fill_n(lane, kLanes, -std::numeric_limits<acc_t>::infinity());
    const auto take = [&](int64_t first, int64_t size) __attribute__((always_inline)) {
      for (int64_t l = 0; l < size; ++l) {
        lane[l] = row[first + l] > lane[l] ? row[first + l] : lane[l];
      }
    };
    const int64_t whole = width - width % kLanes;
    for (int64_t v = 0; v < whole; v += kLanes) take(v, kLanes);
    take(whole, width - whole);
    return *std::max_element(lane, lane + kLanes);
  }
};

// Replaces the logits of a tile by their gradients, without the target's term.
struct LogitGradients {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(acc_t* tile, int64_t num_tokens, int64_t width,
                          const math::LogitGradient<acc_t>* gradients,
                          const math::Softcap<acc_t>* softcap) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      acc_t* row = tile + t * width;
      const math::LogitGradient<acc_t> gradient = gradients[t];
      if (gradient.is_zero()) {
        std::fill_n(row, width, acc_t(0));
      } else if (softcap == nullptr) {
        for (int64_t v = 0; v < width; ++v) row[v] = gradient.other(row[v]);
      } else {
        const math::Softcap<acc_t> function = *softcap;
        for (int64_t v = 0; v < width; ++v) {
          row[v] = gradient.other(row[v]) * function.slope(row[v]);
        }
      }
    }
  }
};

template <typename scalar_t>
class LinearCrossEntropy {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  LinearCrossEntropy(const char* op, const Classifier& classifier, const LossOptions& options)
      : num_tokens(classifier.input.size(0)),
        width(classifier.input.size(1)),
        num_classes(classifier.weight.size(0)),
        num_tiles(at::ceil_div(num_classes, kTileClasses)),
        ignore_index_(options.ignore_index),
        input_(classifier.input.contiguous()),
        weight_(classifier.weight.contiguous()),
        target_(contiguous_index(classifier.target)),
        function_{.smoothing = static_cast<acc_t>(options.label_smoothing),
                  .z_loss = static_cast<acc_t>(options.z_loss)},
        num_targets_(count_targets(op, target_, num_classes, ignore_index_)) {
    if (classifier.bias) bias_ = classifier.bias->to(acc_type()).contiguous();
    if (options.softcap) softcap_ = {.cap = static_cast<acc_t>(*options.softcap)};
  }

  static constexpr at::ScalarType acc_type() { return c10::CppTypeToScalarType<acc_t>::value; }

  // Computes the loss and the log-sum-exp of each token, and the gradients that are not empty for
  // dL/dloss of each token.
  void forward(acc_t* losses, acc_t* lse, const std::vector<acc_t>& grad,
               const std::vector<Tensor>& gradients) {
    const bool differentiates = any(gradients);
    const int64_t kept = kept_tokens();
    const bool keeps = differentiates && kept >= kMinKept;
    run(gradients, keeps ? kept : kMaxTokens, keeps ? num_classes : 0,
        [&](const Block& block, acc_t* kept_logits, acc_t* workspace) {
          log_sum_exp(block, kept_logits, workspace, losses, lse);
          if (differentiates) {
            differentiate(block, kept_logits, workspace, lse, grad.data(), gradients);
          }
        });
  }

  // Computes the gradients that are not empty.
  void backward(const acc_t* lse, const std::vector<acc_t>& grad,
                const std::vector<Tensor>& gradients) {
    if (!any(gradients)) return;
    run(gradients, kMaxTokens, 0, [&](const Block& block, acc_t*, acc_t* workspace) {
      differentiate(block, nullptr, workspace, lse, grad.data(), gradients);
    });
  }

  // Returns dL/dloss of each token for the gradient of the loss: one number, or one for each token
  // if the losses are not reduced.
  std::vector<acc_t> grad_of_tokens(const LossOptions& options, const acc_t* grad_loss) const {
    std::vector<acc_t> grad(num_tokens);
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (is_ignored(t)) continue;
      grad[t] = grad_loss[options.reduces() ? 0 : t] / divisor(options);
    }
    return grad;
  }

  // The number by which the sum of the losses is divided.
  acc_t divisor(const LossOptions& options) const {
    return options.reduction == "mean" ? static_cast<acc_t>(num_targets_) : acc_t(1);
  }

  const int64_t num_tokens, width, num_classes, num_tiles;

 private:
  static bool any(const std::vector<Tensor>& gradients) {
    return std::any_of(gradients.begin(), gradients.end(),
                       [](const Tensor& each) { return each.numel() > 0; });
  }

  int64_t kept_tokens() const {
    const int64_t fit = kKeptBytes / static_cast<int64_t>(sizeof(acc_t)) / num_classes;
    return std::min(fit / kTokensMultiple * kTokensMultiple, kMaxTokens);
  }

  bool is_ignored(int64_t t) const { return targets()[t] == ignore_index_; }
  const int64_t* targets() const { return target_.template const_data_ptr<int64_t>(); }

  // Calls body(block, kept_logits, workspace) for blocks of at most max_tokens tokens;
  // kept_logits has kept_width numbers for each token, or is null if kept_width is 0.
  template <typename Body>
  void run(const std::vector<Tensor>& gradients, int64_t max_tokens, int64_t kept_width,
           const Body& body) {
    const int64_t size =
        std::clamp(at::round_up(at::ceil_div(num_tokens, kMinBlocks), kTokensMultiple),
                   std::min(kMinTokens, max_tokens), max_tokens);
    const int64_t num_blocks = at::ceil_div(num_tokens, size);
    const bool in_order = gradients[1].numel() > 0 || gradients[2].numel() > 0;
    std::vector<Block> blocks;
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t first = b * num_tokens / num_blocks;
      blocks.push_back({.expert = 0,
                        .first_row = first,
                        .num_rows = (b + 1) * num_tokens / num_blocks - first,
                        .index = static_cast<int>(b),
                        .num_blocks = static_cast<int>(num_blocks)});
    }
    num_added_ = std::vector<std::atomic<int>>(num_tiles);
    const int64_t most = std::min(size, num_tokens);
    const int64_t kept_size = whole_lines(most * kept_width);
    for_each_task<acc_t>(num_blocks, in_order,
                         num_threads_for(2 * num_tokens * width * num_classes),
                         kept_size + workspace_size(most), input_.options().dtype(acc_type()),
                         [&](int64_t task, acc_t* workspace) {
                           acc_t* kept = take<acc_t>(workspace, kept_size);
                           body(blocks[task], kept_width > 0 ? kept : nullptr, workspace);
                         });
  }

  int64_t tile_width() const { return std::min(kTileClasses, num_classes); }

  int64_t gemm_size(int64_t tokens) const {
    return whole_lines(std::max({gemm_workspace_size<scalar_t>(tokens, tile_width(), width),
                                 gemm_workspace_size<scalar_t>(tokens, width, tile_width()),
                                 gemm_workspace_size<scalar_t>(tile_width(), width, tokens)}));
  }

  // The workspace size of a block of at most this many tokens.
  int64_t workspace_size(int64_t tokens) const {
    return gemm_size(tokens) + whole_lines(tokens * tile_width()) + 2 * whole_lines(tile_width());
  }

  // A tile of classes.
  struct Tile {
    int64_t index, first, width;
  };

  // Calls body(tile) for every tile of classes.
  template <typename Body>
  void for_each_tile(const Body& body) const {
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t first = i * kTileClasses;
      body(Tile{i, first, std::min(kTileClasses, num_classes - first)});
    }
  }

  const scalar_t* rows_of(const Block& block) const {
    return input_.template const_data_ptr<scalar_t>() + block.first_row * width;
  }

  const scalar_t* weight_of(const Tile& tile) const {
    return weight_.template const_data_ptr<scalar_t>() + tile.first * width;
  }

  // Computes the logits of a tile, [tokens of the block, tile.width].
  void compute_logits(const Block& block, const Tile& tile, acc_t* gemm_space,
                      acc_t* logits) const {
    gemm<scalar_t>(block.num_rows, tile.width, width, plain(rows_of(block), width),
                   transposed(weight_of(tile), width), Write::kReplace, logits, gemm_space);
    const acc_t* bias =
        bias_.defined() ? bias_.template const_data_ptr<acc_t>() + tile.first : nullptr;
    if (bias != nullptr || softcap_) {
      vectorized<Logits>(logits, block.num_rows, tile.width, bias, softcap());
    }
  }

  const math::Softcap<acc_t>* softcap() const { return softcap_ ? &*softcap_ : nullptr; }

  // Calls body(t, place) for each token t of the block whose target is in the tile; place is the
  // target's place in the tile.
  template <typename Body>
  void for_each_target(const Block& block, const Tile& tile, const Body& body) const {
    for (int64_t t = 0; t < block.num_rows; ++t) {
      const int64_t column = targets()[block.first_row + t] - tile.first;
      if (column >= 0 && column < tile.width) body(t, t * tile.width + column);
    }
  }

  // The first pass.
  void log_sum_exp(const Block& block, acc_t* kept_logits, acc_t* workspace, acc_t* losses,
                   acc_t* lse) const {
    acc_t* gemm_space = take<acc_t>(workspace, gemm_size(block.num_rows));
    acc_t* space = take<acc_t>(workspace, block.num_rows * tile_width());
    std::vector<Sums<acc_t>> sums(block.num_rows);
    for_each_tile([&](const Tile& tile) {
      acc_t* logits = kept_logits == nullptr ? space : kept_logits + block.num_rows * tile.first;
      compute_logits(block, tile, gemm_space, logits);
      vectorized<AddTile>(static_cast<const acc_t*>(logits), block.num_rows, tile.width,
                          function_.smoothing != acc_t(0), sums.data());
      for_each_target(block, tile,
                      [&](int64_t t, int64_t place) { sums[t].target_logit = logits[place]; });
    });
    for (int64_t t = 0; t < block.num_rows; ++t) {
      const acc_t log_sum = std::log(sums[t].exponentials);
      const int64_t token = block.first_row + t;
      lse[token] = sums[t].shift + log_sum;
      losses[token] = is_ignored(token)
                          ? acc_t(0)
                          : function_.loss(sums[t].shift, log_sum, sums[t].target_logit,
                                           sums[t].logits / static_cast<acc_t>(num_classes));
    }
  }

  // The second pass.
  void differentiate(const Block& block, acc_t* kept_logits, acc_t* workspace, const acc_t* lse,
                     const acc_t* grad, const std::vector<Tensor>& gradients) {
    acc_t* gemm_space = take<acc_t>(workspace, gemm_size(block.num_rows));
    acc_t* space = take<acc_t>(workspace, block.num_rows * tile_width());
    std::vector<math::LogitGradient<acc_t>> of_logits;
    for (int64_t token = block.first_row; token < block.first_row + block.num_rows; ++token) {
      of_logits.emplace_back(function_, lse[token], grad[token], static_cast<acc_t>(num_classes));
    }
    acc_t* const group = take<acc_t>(workspace, tile_width());
    acc_t* const sum = take<acc_t>(workspace, tile_width());
    const auto data = [&](int64_t i) {
      return gradients[i].numel() > 0 ? gradients[i].template mutable_data_ptr<acc_t>() : nullptr;
    };
    acc_t* const grad_input = data(0);
    acc_t* const grad_weight = data(1);
    acc_t* const grad_bias = data(2);
    for_each_tile([&](const Tile& tile) {
      acc_t* logits = space;
      if (kept_logits == nullptr) {
        compute_logits(block, tile, gemm_space, logits);
      } else {
        logits = kept_logits + block.num_rows * tile.first;
      }
      subtract_targets(block, tile, of_logits.data(), logits);
      if (grad_input != nullptr) {
        gemm<scalar_t>(
            block.num_rows, width, tile.width, plain(static_cast<const acc_t*>(logits), tile.width),
            plain(weight_of(tile), width), tile.index == 0 ? Write::kReplace : Write::kAdd,
            grad_input + block.first_row * width, gemm_space);
      }
      if (grad_weight == nullptr && grad_bias == nullptr) return;
      auto& num_added = num_added_[tile.index];
      for (int added; (added = num_added.load()) != block.index;) num_added.wait(added);
      if (grad_weight != nullptr) {
        gemm<scalar_t>(tile.width, width, block.num_rows,
                       transposed(static_cast<const acc_t*>(logits), tile.width),
                       plain(rows_of(block), width),
                       block.index == 0 ? Write::kReplace : Write::kAdd,
                       grad_weight + tile.first * width, gemm_space);
      }
      if (grad_bias != nullptr) {
        acc_t* to = grad_bias + tile.first;
        vectorized<SumOfRows>(static_cast<const acc_t*>(logits), block.num_rows, tile.width, group,
                              block.index == 0 ? to : sum);
        if (block.index > 0) vectorized<Add>(static_cast<const acc_t*>(sum), tile.width, to);
      }
      num_added.store(block.index + 1);
      num_added.notify_all();
    });
  }

  // Replaces the logits of a tile by their gradients.
  void subtract_targets(const Block& block, const Tile& tile,
                        const math::LogitGradient<acc_t>* of_logits, acc_t* logits) const {
    std::vector<std::pair<int64_t, acc_t>> targets;  // the place and the term of each target
    for_each_target(block, tile, [&](int64_t t, int64_t place) {
      const acc_t slope = softcap_ ? softcap_->slope(logits[place]) : acc_t(1);
      targets.emplace_back(place, of_logits[t].target * slope);
    });
    vectorized<LogitGradients>(logits, block.num_rows, tile.width, of_logits, softcap());
    for (const auto& [place, term] : targets) logits[place] -= term;
  }

  static constexpr bool kSame = std::is_same_v<scalar_t, acc_t>;

  int64_t ignore_index_;
  Tensor input_, weight_, target_, bias_;
  std::optional<math::Softcap<acc_t>> softcap_;
  math::CrossEntropy<acc_t> function_;
  // The number of blocks that are already in the gradients of a tile's classes.
  std::vector<std::atomic<int>> num_added_;
  int64_t num_targets_;  // that are not ignored
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
    LinearCrossEntropy<scalar_t> problem(op, classifier, options);
    outputs = linear_cross_entropy_outputs(empty, classifier, options, keep_gradients);
    const auto& [loss, lse, gradients] = outputs;
    const Tensor losses = options.reduces() ? empty_of(empty, lse) : loss;
    auto* each = losses.mutable_data_ptr<acc_t>();
    const acc_t one = 1;
    if (problem.num_tokens > 0) {
      problem.forward(
          each, lse.mutable_data_ptr<acc_t>(),
          options.reduces() ? problem.grad_of_tokens(options, &one) : std::vector<acc_t>(),
          gradients);
    } else {
      for (const Tensor& gradient : gradients) gradient.zero_();
    }
    if (!options.reduces()) return;
    auto* total = loss.mutable_data_ptr<acc_t>();
    vectorized<Total>(static_cast<const acc_t*>(each), problem.num_tokens, total);
    *total /= problem.divisor(options);
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
      results = linear_cross_entropy_gradients(empty, classifier, needs, type);
      for (size_t i = 0; i < results.size(); ++i) {
        if (results[i].numel() == 0) continue;
        const Tensor kept = gradients[i].contiguous();
        const auto* from = kept.const_data_ptr<acc_t>();
        auto* to = results[i].mutable_data_ptr<scalar_t>();
        parallel_for(kept.numel(), 2, [&](int64_t begin, int64_t end) {
          vectorized<ScaledCopy>(*grad, from + begin, end - begin, to + begin);
        });
      }
      return;
    }
    LinearCrossEntropy<scalar_t> problem(op, classifier, options);
    results = linear_cross_entropy_gradients(empty, classifier, needs, accumulate_type(grad_loss));
    if (problem.num_tokens > 0) {
      const Tensor sums = lse.contiguous();
      problem.backward(sums.const_data_ptr<acc_t>(), problem.grad_of_tokens(options, grad),
                       results);
    }
    for (Tensor& result : results) {
      if (problem.num_tokens == 0) result.zero_();
      result = result.to(type);
    }
  });
  return results;
}

}  // namespace
}  // namespace moe_ext::cpu

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("linear_cross_entropy",
         &moe_ext::linear_cross_entropy_of<moe_ext::cpu::linear_cross_entropy_cpu>);
  m.impl(
      "_linear_cross_entropy_backward",
      &moe_ext::linear_cross_entropy_backward_of<moe_ext::cpu::linear_cross_entropy_backward_cpu>);
}
