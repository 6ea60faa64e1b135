// If an allocation fails in a task of a parallel loop, the operator throws. The other tasks do not
// wait for the failed one. ctest ends a test that hangs.
#include <ATen/Parallel.h>
#include <c10/util/ParallelGuard.h>
#include <gtest/gtest.h>
#include <moe_ext/ops.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "exported.h"

namespace {

// The number of allocations in tasks until one fails; negative: none fails.
std::atomic<int64_t> until_failure{-1};

bool fails() {
  return until_failure >= 0 && c10::ParallelGuard::is_enabled() && until_failure.fetch_sub(1) == 0;
}

}  // namespace

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  constexpr std::size_t kMost = std::size_t{1} << 30;  // only a corrupted file needs more
  return size > kMost || fails() ? nullptr : std::malloc(size > 0 ? size : 1);
}
void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using torch::Tensor;

// A size for each order of linear_cross_entropy.cpp: by tokens and by classes.
struct Sizes {
  int64_t num_tokens, width;
};

TEST(Allocation, FailureInEachTaskOfLinearCrossEntropy) {
  const int before = at::get_num_threads();
  for (const auto& [num_tokens, width] : {Sizes{400, 8}, Sizes{260, 512}}) {
    torch::manual_seed(1);
    const Tensor x = torch::randn({num_tokens, width}).requires_grad_();
    const Tensor weight = torch::randn({1100, width}).requires_grad_();
    const Tensor target = torch::randint(1100, {num_tokens});
    const auto run = [&](bool recompute) {
      const Tensor loss = moe_ext::ops::linear_cross_entropy(
          x, weight, target, {.label_smoothing = 0.1, .recompute = recompute});
      return torch::autograd::grad({loss}, {x, weight});
    };
    for (const int num_threads : {1, 2, 3, 8}) {
      for (const bool recompute : {false, true}) {
        SCOPED_TRACE(c10::str(width, " columns, ", num_threads, " threads, ", recompute));
        at::set_num_threads(num_threads);
        const auto expected = run(recompute);
        int64_t failures = 0;
        for (bool failed = true; failed;) {
          until_failure = failures;
          try {
            run(recompute);
            failed = false;
          } catch (const std::bad_alloc&) {
            ++failures;
          }
          until_failure = -1;
        }
        EXPECT_GE(failures, 6);  // at least one in each task
        const auto after = run(recompute);
        for (size_t i = 0; i < after.size(); ++i) {
          EXPECT_TRUE(exported::same_bits(after[i], expected[i]));
        }
      }
    }
  }
  at::set_num_threads(before);
}

}  // namespace
