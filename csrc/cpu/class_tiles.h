// The tiles of the logits of a linear classifier: some tokens by kTileClasses classes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "../kernels/linear_cross_entropy.h"
#include "../math/integers.h"
#include "../math/linear_cross_entropy.h"
#include "arena.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "memory.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// The classes of a tile; the last tile may have fewer. All sums over the classes are by tile.
constexpr int64_t kTileClasses = 512;

struct Tokens {
  int64_t first, count;
};

// A tile's classes.
struct Classes {
  int64_t index, first, count;
};

struct AllFinite {
  template <typename scalar_t>
  MOE_EXT_KERNEL void run(const scalar_t* row, int64_t size, bool* finite) {
    using acc_t = acc_type<scalar_t>;
    int32_t others = 0;
    for (int64_t i = 0; i < size; ++i) {
      const acc_t x = static_cast<acc_t>(row[i]);
      others |= x - x != acc_t(0);
    }
    *finite = others == 0;
  }
};

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

// The sums over the classes of a token.
template <typename acc_t>
struct Sums {
  acc_t shift = -std::numeric_limits<acc_t>::infinity();  // the largest logit
  acc_t exponentials = 0;                                 // sum of e^(l - shift)
  acc_t logits = 0;
  acc_t target_logit = 0;
};

// Adds the sums of a tile to the sums of its tokens.
struct AddSums {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const Sums<acc_t>* tile, int64_t num_tokens, Sums<acc_t>* sums) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const Sums<acc_t>& from = tile[t];
      Sums<acc_t>& to = sums[t];
      const acc_t largest = std::max(to.shift, from.shift);
      const acc_t shift = finite_shift(largest);
      to.exponentials = to.exponentials * math::exp(to.shift - shift) +
                        from.exponentials * math::exp(from.shift - shift);
      to.shift = largest;
      to.logits += from.logits;
      to.target_logit += from.target_logit;
    }
  }

  // Without a finite logit, the difference from the largest one would be NaN.
  template <typename acc_t>
  MOE_EXT_KERNEL acc_t finite_shift(acc_t largest) {
    return largest == -std::numeric_limits<acc_t>::infinity() ? acc_t(0) : largest;
  }
};

// Computes the sums of a tile, without the target's logit, and the exponentials e^(l - shift). They
// are not stored if `exponentials` is null.
struct SumTile {
  template <typename acc_t, typename p_t>
  MOE_EXT_KERNEL void run(const acc_t* tile, int64_t num_tokens, int64_t width, bool sums_logits,
                          p_t* exponentials, Sums<acc_t>* sums) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const acc_t* row = tile + t * width;
      const acc_t largest = largest_of(row, width);
      const acc_t shift = AddSums::finite_shift(largest);
      const auto exponential = [&](int64_t v) __attribute__((always_inline)) {
        return math::exp(row[v] - shift);
      };
      const auto add = [&](int64_t v, acc_t partial) __attribute__((always_inline)) {
        return partial + exponential(v);
      };
      const auto store_and_add = [&](int64_t v, acc_t partial) __attribute__((always_inline)) {
        const acc_t value = exponential(v);
        exponentials[t * width + v] = static_cast<p_t>(value);
        return partial + value;
      };
      const acc_t sum = exponentials == nullptr ? sum_of_terms<acc_t>(width, add)
                                                : sum_of_terms<acc_t>(width, store_and_add);
      sums[t] = {.shift = largest, .exponentials = sum};
      if (sums_logits) sums[t].logits = cpu::sum(row, width);
    }
  }
};

// Computes the gradients P of a token: (other - [v = target] target_term) slope. `target` is the
// column of the target, or -1.
template <typename acc_t, typename p_t, typename Other, typename Slope>
MOE_EXT_KERNEL void gradients_of_row(const math::LogitGradient<acc_t>& gradient, int64_t width,
                                     int64_t target, const Other& other, const Slope& slope,
                                     p_t* p) {
  if (gradient.is_zero()) {
    std::fill_n(p, width, p_t(0));
    return;
  }
  for (int64_t v = 0; v < width; ++v) p[v] = static_cast<p_t>(other(v) * slope(v));
  if (target >= 0) {
    p[target] = static_cast<p_t>((other(target) - gradient.target) * slope(target));
  }
}

// Computes the gradients P of the logits of a tile from the exponentials of SumTile.
struct GradientsOfExponentials {
  template <typename acc_t, typename p_t>
  MOE_EXT_KERNEL void run(const p_t* exponentials, int64_t num_tokens, int64_t width,
                          const Sums<acc_t>* sums, const math::LogitGradient<acc_t>* gradients,
                          const int64_t* targets, p_t* p) {
    for (int64_t t = 0; t < num_tokens; ++t, exponentials += width, p += width) {
      const math::LogitGradient<acc_t> gradient = gradients[t];
      const acc_t softmax = gradient.softmax * math::exp(sums[t].shift - gradient.lse);
      const auto other = [&](int64_t v) __attribute__((always_inline)) {
        return std::fma(softmax, static_cast<acc_t>(exponentials[v]), -gradient.uniform);
      };
      const auto slope = [](int64_t) __attribute__((always_inline)) { return acc_t(1); };
      gradients_of_row(gradient, width, targets[t], other, slope, p);
    }
  }
};

// Computes the gradients of the products whose softcapped logits are in a tile.
struct GradientsOfSoftcap {
  template <typename acc_t, typename p_t>
  MOE_EXT_KERNEL void run(const acc_t* logits, int64_t num_tokens, int64_t width,
                          math::Softcap<acc_t> softcap, const math::LogitGradient<acc_t>* gradients,
                          const int64_t* targets, p_t* p) {
    for (int64_t t = 0; t < num_tokens; ++t, logits += width, p += width) {
      const math::LogitGradient<acc_t> gradient = gradients[t];
      const auto other = [&](int64_t v) __attribute__((always_inline)) {
        return gradient.other(logits[v]);
      };
      const auto slope = [&](int64_t v) __attribute__((always_inline)) {
        return softcap.slope(logits[v]);
      };
      gradients_of_row(gradient, width, targets[t], other, slope, p);
    }
  }
};

// A linear classifier with targets, and the functions of its tiles. A token's results do not depend
// on the other tokens of a tile.
template <typename scalar_t>
class ClassTiles {
 public:
  using acc_t = acc_type<scalar_t>;
  // The type of P, the gradients of the logits. Products of bfloat16 numbers would round P anyway.
  using p_t = std::conditional_t<std::is_same_v<scalar_t, c10::BFloat16>, scalar_t, acc_t>;

  explicit ClassTiles(const LinearClassifier<scalar_t>& classifier)
      : num_tokens(classifier.num_tokens),
        width(classifier.width),
        num_classes(classifier.num_classes),
        num_tiles(ceil_div(num_classes, kTileClasses)),
        classifier_(classifier),
        function_{.smoothing = static_cast<acc_t>(classifier.label_smoothing),
                  .z_loss = static_cast<acc_t>(classifier.z_loss)} {
    if (classifier.softcap) softcap_ = {.cap = static_cast<acc_t>(*classifier.softcap)};
    remove_ignored_nan();
  }

  // The largest number of classes in a tile.
  int64_t max_classes() const { return std::min(kTileClasses, num_classes); }

  Classes tile(int64_t index) const {
    const int64_t first = index * kTileClasses;
    return {.index = index, .first = first, .count = std::min(kTileClasses, num_classes - first)};
  }

  // The workspace of the tiles of at most some tokens.
  struct Workspace {
    Workspace(const ClassTiles& tiles, int64_t tokens, Arena& arena)
        : gemm(arena, {{tokens, tiles.max_classes(), tiles.width},
                       {tokens, tiles.width, tiles.max_classes()},
                       {tiles.max_classes(), tiles.width, tokens}}),
          tile(arena.take<acc_t>(tokens * tiles.max_classes())),
          kept(arena.take<acc_t>(tiles.kept_size(tokens * tiles.max_classes()))),
          bias(arena.take<acc_t>(tiles.max_classes())),
          group(arena.take<acc_t>(tiles.max_classes())) {}

    GemmWorkspace<scalar_t> gemm;
    acc_t* tile;   // the logits, then P
    acc_t* kept;   // if the tile is not kept elsewhere
    acc_t* bias;   // the share of the tokens in the gradient of bias
    acc_t* group;  // the sum of a group of rows
  };

  // Computes the logits of a tile, [tokens.count, classes.count].
  void compute_logits(Tokens tokens, const Classes& classes, const Workspace& workspace) const {
    acc_t* const logits = workspace.tile;
    gemm<scalar_t>(tokens.count, classes.count, width, plain(rows_of(tokens), width),
                   transposed(weight_of(classes), width), Write::kReplace, logits, workspace.gemm);
    const acc_t* bias = classifier_.bias != nullptr ? classifier_.bias + classes.first : nullptr;
    if (bias != nullptr || softcap_) {
      vectorized<Logits>(logits, tokens.count, classes.count, bias, softcap());
    }
  }

  // The size of the buffer, in elements of acc_t, in which sum() keeps the logits of a tile.
  // Buffers in sequence start at cache lines.
  int64_t kept_size(int64_t num_logits) const {
    constexpr int64_t kMultiple = 16, kInOne = sizeof(acc_t) / sizeof(p_t);
    return round_up(softcap_ ? num_logits : ceil_div(num_logits, kInOne), kMultiple);
  }

  // Computes the sums of a tile, one for each token. If `kept` is not null, keeps in it what
  // differentiate() needs: the exponentials, or the logits if there is a softcap.
  void sum(Tokens tokens, const Classes& classes, const acc_t* logits, acc_t* kept,
           Sums<acc_t>* sums) const {
    auto* exponentials = softcap_ ? nullptr : reinterpret_cast<p_t*>(kept);
    if (softcap_ && kept != nullptr) std::copy_n(logits, tokens.count * classes.count, kept);
    vectorized<SumTile>(logits, tokens.count, classes.count, function_.smoothing != acc_t(0),
                        exponentials, sums);
    const auto columns = columns_of_targets(tokens, classes);
    for (int64_t t = 0; t < tokens.count; ++t) {
      if (columns[t] >= 0) sums[t].target_logit = logits[t * classes.count + columns[t]];
    }
  }

  // Computes losses and log-sum-exps from the sums over all tiles. The arrays have all tokens.
  void finish(Tokens tokens, const Sums<acc_t>* sums, acc_t* losses, acc_t* lse) const {
    for (int64_t t = 0; t < tokens.count; ++t) {
      const acc_t log_sum = std::log(sums[t].exponentials);
      const int64_t token = tokens.first + t;
      lse[token] = sums[t].shift + log_sum;
      losses[token] = is_ignored(token)
                          ? acc_t(0)
                          : function_.loss(sums[t].shift, log_sum, sums[t].target_logit,
                                           sums[t].logits / static_cast<acc_t>(num_classes));
    }
  }

  // Returns the derivatives of the tokens' losses; lse and grad have all tokens.
  std::vector<math::LogitGradient<acc_t>> logit_gradients(Tokens tokens, const acc_t* lse,
                                                          const acc_t* grad) const {
    std::vector<math::LogitGradient<acc_t>> gradients;
    gradients.reserve(tokens.count);
    for (int64_t token = tokens.first; token < tokens.first + tokens.count; ++token) {
      gradients.emplace_back(function_, lse[token], grad[token], static_cast<acc_t>(num_classes));
    }
    return gradients;
  }

  // Computes the gradients P of the logits of a tile, [tokens.count, classes.count], from the
  // tile's sums and what sum() kept.
  void differentiate(Tokens tokens, const Classes& classes, const acc_t* kept,
                     const Sums<acc_t>* sums, const math::LogitGradient<acc_t>* of_logits,
                     p_t* p) const {
    const auto columns = columns_of_targets(tokens, classes);
    const int64_t* targets = columns.data();
    if (softcap_) {
      vectorized<GradientsOfSoftcap>(kept, tokens.count, classes.count, *softcap_, of_logits,
                                     targets, p);
    } else {
      vectorized<GradientsOfExponentials>(reinterpret_cast<const p_t*>(kept), tokens.count,
                                          classes.count, sums, of_logits, targets, p);
    }
  }

  // Writes or adds the share of a tile in the gradient of input: P W.
  void add_to_input(Tokens tokens, const Classes& classes, const p_t* p, Write write,
                    acc_t* grad_input, const Workspace& workspace) const {
    gemm<scalar_t>(tokens.count, width, classes.count, plain(p, classes.count),
                   plain(weight_of(classes), width), write, grad_input + tokens.first * width,
                   workspace.gemm);
  }

  // Writes or adds the share of the tokens in the gradients of weight, P^T X, and of bias, the sum
  // of the rows of P. A gradient may be null.
  void add_to_weight(Tokens tokens, const Classes& classes, const p_t* p, Write write,
                     acc_t* grad_weight, acc_t* grad_bias, const Workspace& workspace) const {
    if (grad_weight != nullptr) {
      gemm<scalar_t>(classes.count, width, tokens.count, transposed(p, classes.count),
                     plain(rows_of(tokens), width), write, grad_weight + classes.first * width,
                     workspace.gemm);
    }
    if (grad_bias != nullptr) {
      acc_t* const to = grad_bias + classes.first;
      const bool adds = write == Write::kAdd;
      vectorized<SumOfRows>(p, tokens.count, classes.count, workspace.group,
                            adds ? workspace.bias : to);
      if (adds) vectorized<Add>(static_cast<const acc_t*>(workspace.bias), classes.count, to);
    }
  }

  const int64_t num_tokens, width, num_classes, num_tiles;

 private:
  bool is_ignored(int64_t t) const { return classifier_.target[t] == classifier_.ignore_index; }

  // Copies the input with zeros for ignored tokens, if one is not finite: the gradient of weight
  // has the product of such a token and its gradient 0.
  void remove_ignored_nan() {
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (!is_ignored(t)) continue;
      bool finite = true;
      vectorized<AllFinite>(classifier_.input + t * width, width, &finite);
      if (finite) continue;
      if (finite_input_.data() == nullptr) {
        finite_input_ = Array<scalar_t>(num_tokens * width);
        std::copy_n(classifier_.input, num_tokens * width, finite_input_.data());
      }
      std::fill_n(finite_input_.data() + t * width, width, scalar_t(0));
    }
  }

  const scalar_t* rows_of(Tokens tokens) const {
    const scalar_t* copy = finite_input_.data();
    return (copy != nullptr ? copy : classifier_.input) + tokens.first * width;
  }

  const scalar_t* weight_of(const Classes& classes) const {
    return classifier_.weight + classes.first * width;
  }

  const math::Softcap<acc_t>* softcap() const { return softcap_ ? &*softcap_ : nullptr; }

  // Returns the column of each token's target in the tile, or -1 if another tile has it.
  std::vector<int64_t> columns_of_targets(Tokens tokens, const Classes& classes) const {
    std::vector<int64_t> columns(tokens.count);
    for (int64_t t = 0; t < tokens.count; ++t) {
      const int64_t column = classifier_.target[tokens.first + t] - classes.first;
      columns[t] = column >= 0 && column < classes.count ? column : -1;
    }
    return columns;
  }

  const LinearClassifier<scalar_t>& classifier_;
  Array<scalar_t> finite_input_;  // or no memory
  std::optional<math::Softcap<acc_t>> softcap_;
  math::CrossEntropy<acc_t> function_;
};

}  // namespace moe_ext::cpu
