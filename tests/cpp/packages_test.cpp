// AOTInductor packages: five layers are bitwise identical to eager mode in Python.
#include <gtest/gtest.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <thread>

#include "exported.h"

namespace {

using namespace exported;
using torch::inductor::AOTIModelPackageLoader;

// Returns how many outputs of the package differ from those of Python.
int64_t count_differences(AOTIModelPackageLoader& package, const Tree& expected) {
  const auto actual = package.run({expected["x"]});
  const auto layers = expected.list("y");
  if (actual.size() != layers.size()) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < layers.size(); ++i) count += !same_bits(actual[i], layers[i]);
  return count;
}

TEST(Packages, EqualEagerForAnyNumberOfTokens) {
  AOTIModelPackageLoader package(folder + "/packages.pt2");
  const auto cases = Tree::file("packages").branches();
  ASSERT_EQ(cases.size(), 5);
  for (const auto& [tokens, expected] : cases) {
    ASSERT_EQ(expected.list("y").size(), 5);
    EXPECT_EQ(count_differences(package, expected), 0) << tokens << " tokens";
  }
}

TEST(Packages, RunInSeveralThreadsAtOnce) {
  constexpr int64_t num_threads = 4;
  AOTIModelPackageLoader package(folder + "/packages.pt2", "model",
                                 /*run_single_threaded=*/false, /*num_runners=*/num_threads);
  const auto cases = Tree::file("packages").branches();
  std::vector<int64_t> differences(num_threads);
  std::vector<std::thread> threads;
  for (auto& count : differences) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        for (const auto& [_, expected] : cases) count += count_differences(package, expected);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(differences, std::vector<int64_t>(num_threads));
}

}  // namespace
