// The C++ side of moe-lab benchmark cpp: times calls for one token.
//
//   benchmark LAYER.pt2 MODEL.pt2 D E K F
//
// LAYER.pt2 maps tokens [T, D] to outputs, MODEL.pt2 maps word ids [B, S] to log-probabilities.
// Each line of stdin is the name of a function and a number of calls. The answer on stdout is the
// mean time of a call in microseconds.
#include <ATen/core/dispatch/Dispatcher.h>
#include <moe_ext/ops.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

using torch::Tensor;

// Returns a call of the operator without the dispatcher's keys above the CPU: the kernel alone.
std::function<void()> kernel(const Tensor& x, const std::vector<Tensor>& weights,
                             const moe_ext::ops::ExpertsOptions& options) {
  using Optional = std::optional<Tensor>;
  using Signature = std::tuple<Tensor, std::vector<Tensor>>(
      const Tensor&, const Optional&, const Optional&, const Optional&, const Optional&,
      at::TensorList, std::optional<at::TensorList>, std::string_view, bool,
      std::optional<at::ArrayRef<double>>);
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("moe_ext::experts", "").typed<Signature>();
  return [=] {
    op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), x, options.offsets, options.inverse,
                  options.token_offsets, options.gates, weights, std::nullopt, "relu", false,
                  std::nullopt);
  };
}

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr << "usage: benchmark LAYER.pt2 MODEL.pt2 D E K F\n";
    return 2;
  }
  const auto size = [&](int i) { return static_cast<int64_t>(std::stoll(argv[i])); };
  const auto D = size(3), E = size(4), K = size(5), F = size(6);
  torch::NoGradGuard no_grad;
  torch::set_num_threads(1);
  torch::inductor::AOTIModelPackageLoader layer(argv[1]), model(argv[2]);

  const auto x = torch::randn({1, D});
  const std::vector<Tensor> weights = {torch::randn({E, D, F}), torch::randn({E, F, D})};
  const auto plan = moe_ext::ops::dispatch_plan(torch::arange(K).unsqueeze(0), E);
  const moe_ext::ops::ExpertsOptions options{
      .offsets = plan.offsets, .inverse = plan.inverse, .gates = torch::rand({1, K})};
  const auto word = torch::zeros({1, 1}, torch::kInt64);

  const std::map<std::string, std::function<void()>> functions = {
      {"kernel", kernel(x, weights, options)},
      {"experts", [&] { moe_ext::ops::experts(x, weights, {}, "relu", options); }},
      {"layer", [&] { layer.run({x}); }},
      {"model", [&] { model.run({word}); }},
  };
  std::string name;
  for (int64_t calls; std::cin >> name >> calls;) {
    const auto& function = functions.at(name);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) function();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    std::cout << time.count() / static_cast<double>(calls) << std::endl;
  }
  return std::cout ? 0 : 1;
}
