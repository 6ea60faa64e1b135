// The cross-entropy of a linear layer on the CPU. The logits exist only as tiles: some tokens by
// kTileClasses classes.
//
// Two passes go over the tiles. The first computes the log-sum-exp of each token. The second
// computes the gradients P of the logits, and adds P W to the gradient of input and P^T X to the
// gradient of weight. If a tile's exponentials are kept between the passes, only three GEMMs are
// necessary; otherwise the second pass recomputes them. There are two orders:
//
// By tokens, if there are few classes: a thread makes both passes over all tiles of a block of
// tokens, and keeps them.
//
// By classes: the threads make each pass over the tiles of at most kMaxTokens tokens together. So
// the weight is read and packed once, and its gradient is written once, for many tokens. If there
// is one block and its tiles fit into their rows of the gradient of weight, they are kept there.
// Otherwise they are kept in memory that the threads share. If that holds fewer than kMinKept
// tokens, the second pass recomputes them, but for a first block that fits into the gradient.
//
// A token's results do not depend on the order or on other tokens. The gradients of weight and bias
// are summed over the blocks in order.
#include "../kernels/linear_cross_entropy.h"

#include <algorithm>
#include <vector>

#include "../math/integers.h"
#include "arena.h"
#include "block_scheduler.h"
#include "class_tiles.h"
#include "elementwise.h"
#include "gemm/gemm.h"
#include "parallel.h"
#include "progress.h"
#include "vectorize.h"

namespace moe_ext {
namespace cpu {
namespace {

// By tokens: the limits of a block's tokens. With few tokens, reading and packing the weight takes
// long. A tile stays in the second cache level. There are about kMinBlocks blocks for the threads.
// The kept tiles of a thread take at most kBytesOfThread.
constexpr int64_t kMinBlockTokens = 48, kMaxBlockTokens = 192, kMinBlocks = 8;
constexpr int64_t kBytesOfThread = 7 << 20;

// By classes: the most tokens that share a packed tile of the weight. One thread at a time adds to
// the gradient of input of kPartTokens tokens.
constexpr int64_t kMaxTokens = kFullRateRows, kPartTokens = 128;

// The tiles that the threads keep together take at most kKeptBytes. More tokens than kMaxKept are
// hardly faster; with fewer than kMinKept, it is faster to recompute the tiles of kMaxTokens.
constexpr int64_t kMinKept = 64, kMaxKept = 256, kKeptBytes = 64 << 20;

// Tokens are taken in multiples of this, which fill the tiles of the GEMM.
constexpr int64_t kTokensMultiple = 6;

// The parts of `tokens`, about equal and of at most `most` tokens.
std::vector<Tokens> split(Tokens tokens, int64_t most) {
  const int64_t num_parts = ceil_div(tokens.count, most);
  std::vector<Tokens> parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Part part = part_of(tokens.count, p, num_parts);
    parts.push_back({.first = tokens.first + part.begin, .count = part.size()});
  }
  return parts;
}

template <typename scalar_t>
class TiledCrossEntropy {
 public:
  using acc_t = acc_type<scalar_t>;
  using p_t = typename ClassTiles<scalar_t>::p_t;
  using Workspace = typename ClassTiles<scalar_t>::Workspace;

  explicit TiledCrossEntropy(const LinearCrossEntropy<scalar_t>& arguments)
      : tiles_(arguments.classifier), arguments_(arguments) {}

  // Computes the losses and log-sum-exps that are not null, then the gradients that are not empty.
  void run() {
    if (tiles_.num_tokens == 0 || !(sums() || differentiates())) return;
    if (tiles_.num_tokens <= kMaxTokens && keeps_in_weight(tiles_.num_tokens)) {
      by_classes(kMaxTokens, nullptr);
    } else if (tokens_in(kBytesOfThread) >= kMaxBlockTokens) {
      by_tokens();
    } else if (const int64_t fit = tokens_in(kKeptBytes); keeps() && fit >= kMinKept) {
      const int64_t most = std::min({fit, kMaxKept, tiles_.num_tokens});
      const Array<acc_t> memory(tiles_.num_tiles * kept_size_of_tile(most));
      by_classes(most, memory.data());
    } else {
      by_classes(kMaxTokens, nullptr);
    }
  }

 private:
  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(sizeof(acc_t)); }
  bool sums() const { return arguments_.losses != nullptr; }
  bool of_classes() const {
    return arguments_.grad_weight != nullptr || arguments_.grad_bias != nullptr;
  }
  bool differentiates() const { return arguments_.grad_input != nullptr || of_classes(); }
  bool keeps() const { return sums() && differentiates(); }

  // The number of tokens whose kept tiles fit into some bytes.
  int64_t tokens_in(int64_t size) const {
    const int64_t fit = size / bytes(tiles_.kept_size(tiles_.num_classes));
    return fit / kTokensMultiple * kTokensMultiple;
  }

  // Whether the rows of the gradient of weight can keep the tiles of some tokens.
  bool keeps_in_weight(int64_t num_tokens) const {
    return keeps() && arguments_.grad_weight != nullptr &&
           tiles_.kept_size(num_tokens) <= tiles_.width;
  }

  void by_tokens() {
    const int64_t equal = round_up(ceil_div(tiles_.num_tokens, kMinBlocks), kTokensMultiple);
    const auto blocks =
        split({0, tiles_.num_tokens}, std::clamp(equal, kMinBlockTokens, kMaxBlockTokens));
    const int64_t tokens = ceil_div(tiles_.num_tokens, static_cast<int64_t>(blocks.size()));
    struct BlockWorkspace {
      acc_t* kept;  // all tiles, or null
      Workspace tile;
    };
    Progress turns(tiles_.num_tiles);
    for_each(
        blocks.size(), of_classes() ? &turns : nullptr,
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
    if (!differentiates()) return;
    const auto of_logits = tiles_.logit_gradients(tokens, arguments_.lse, arguments_.grad);
    for (int64_t i = 0; i < tiles_.num_tiles; ++i) {
      const Classes classes = tiles_.tile(i);
      const p_t* p = differentiate_tile(tokens, i, workspace, kept_tile(i), of_tiles, of_logits);
      if (arguments_.grad_input != nullptr) {
        tiles_.add_to_input(tokens, classes, p, added(i), arguments_.grad_input, workspace);
      }
      if (!of_classes()) continue;
      turns.in_turn(i, block, [&] {
        tiles_.add_to_weight(tokens, classes, p, added(block), arguments_.grad_weight,
                             arguments_.grad_bias, workspace);
      });
    }
  }

  // Where the tiles of a block of tokens are kept, by class.
  struct Kept {
    acc_t* data;   // null: nowhere
    int64_t size;  // of a tile

    acc_t* tile(int64_t index) const { return data == nullptr ? nullptr : data + index * size; }
  };

  // The tiles of `most` tokens are kept in `memory` if it is not null.
  void by_classes(int64_t most, acc_t* memory) {
    const auto blocks = split({0, tiles_.num_tokens}, most);
    for (size_t b = 0; b < blocks.size(); ++b) {
      Kept kept{memory, kept_size_of_tile(most)};
      // Only the first block finds the memory of the gradient of weight unused.
      if (memory == nullptr && b == 0 && keeps_in_weight(blocks[b].count)) {
        kept = {arguments_.grad_weight, kTileClasses * tiles_.width};
      }
      std::vector<Sums<acc_t>> of_tiles(tiles_.num_tiles * blocks[b].count);
      if (sums()) sum_by_classes(blocks[b], kept, of_tiles);
      if (differentiates()) {
        differentiate_by_classes(static_cast<int>(b), blocks[b], kept, of_tiles);
      }
    }
  }

  void sum_by_classes(Tokens tokens, const Kept& kept, std::vector<Sums<acc_t>>& of_tiles) {
    for_each(tiles_.num_tiles, nullptr, workspace_of(tokens),
             [&](int64_t i, const Workspace& workspace) {
               sum_tile(tokens, i, workspace, kept.tile(i), of_tiles);
             });
    finish(tokens, of_tiles);
  }

  void differentiate_by_classes(int block, Tokens tokens, const Kept& kept,
                                std::vector<Sums<acc_t>>& of_tiles) {
    const auto of_logits = tiles_.logit_gradients(tokens, arguments_.lse, arguments_.grad);
    const auto parts = split(tokens, kPartTokens);
    Progress turns(static_cast<int64_t>(parts.size()));
    for_each(tiles_.num_tiles, arguments_.grad_input != nullptr ? &turns : nullptr,
             workspace_of(tokens), [&](int64_t i, const Workspace& workspace) {
               const Classes classes = tiles_.tile(i);
               const p_t* p =
                   differentiate_tile(tokens, i, workspace, kept.tile(i), of_tiles, of_logits);
               if (of_classes()) {
                 tiles_.add_to_weight(tokens, classes, p, added(block), arguments_.grad_weight,
                                      arguments_.grad_bias, workspace);
               }
               if (arguments_.grad_input == nullptr) return;
               for (size_t part = 0; part < parts.size(); ++part) {
                 const p_t* of_part = p + (parts[part].first - tokens.first) * classes.count;
                 turns.in_turn(part, static_cast<int>(i), [&] {
                   tiles_.add_to_input(parts[part], classes, of_part, added(i),
                                       arguments_.grad_input, workspace);
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
    tiles_.finish(tokens, sums.data(), arguments_.losses, arguments_.new_lse);
  }

  template <typename Take, typename Body>
  void for_each(int64_t num_tasks, Progress* progress, const Take& take, const Body& body) const {
    const int64_t flops = 2 * tiles_.num_tokens * tiles_.width * tiles_.num_classes;
    for_each_task(num_tasks, progress, num_threads_for(flops), take, body);
  }

  const ClassTiles<scalar_t> tiles_;
  const LinearCrossEntropy<scalar_t>& arguments_;
};

struct Total {
  template <typename acc_t>
  MOE_EXT_KERNEL void run(const acc_t* values, int64_t size, acc_t* total) {
    *total = sum(values, size);
  }
};

struct Scaled {
  template <typename acc_t, typename scalar_t>
  MOE_EXT_KERNEL void run(acc_t scale, const acc_t* from, int64_t size, scalar_t* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<scalar_t>(scale * from[i]);
  }
};

}  // namespace
}  // namespace cpu
using namespace cpu;

template <typename scalar_t>
void LinearCrossEntropy<scalar_t>::on_cpu() const {
  TiledCrossEntropy<scalar_t>(*this).run();
  if (loss != nullptr) {
    vectorized<Total>(static_cast<const acc_t*>(losses), classifier.num_tokens, loss);
  }
}
MOE_EXT_DEFINE_RUN_ON_CPU(LinearCrossEntropy)

template <typename scalar_t>
void ScaledCopy<scalar_t>::on_cpu() const {
  parallel_for(size, 2, [&](int64_t begin, int64_t end) {
    vectorized<Scaled>(scale, from + begin, end - begin, to + begin);
  });
}
MOE_EXT_DEFINE_RUN_ON_CPU(ScaledCopy)

}  // namespace moe_ext
