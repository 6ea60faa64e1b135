// Many threads may run one layer at the same time.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <thread>

#include "modules.h"

namespace {

using namespace exported;

TEST(Threads, MayShareALayerInEvaluation) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  for (const auto& [name, make] : layers) {
    SCOPED_TRACE(name);
    torch::manual_seed(1);
    const auto module = make();
    const Tree inputs({{"x", torch::randn({200, D})}});
    torch::NoGradGuard guard;
    for (auto& parameter : module->parameters()) {
      parameter.add_(torch::randn(parameter.sizes()).mul(0.1));
    }
    call(*module, inputs);  // sets the thresholds of balanced gates
    module->eval();
    const auto expected = call(*module, inputs);
    std::vector<StateDict> results(8);
    std::vector<std::thread> threads;
    for (auto& result : results) {
      threads.emplace_back([&, &layer = module] {
        torch::NoGradGuard own_guard;  // a guard acts on one thread
        for (int i = 0; i < 20; ++i) {
          result = call(*layer, inputs);
          if (!same_bits(result.at("y"), expected.at("y"))) return;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& result : results) expect_same_bits(result, expected);
  }
  at::set_num_threads(before);
}

}  // namespace
