// Trains a language model with a mixture of experts on text, without Python.
//
//   cmake -S examples/cpp -B build/examples -G Ninja \
//     -DCMAKE_PREFIX_PATH="$(python -m moe_ext.info --cmake-prefix)"
//   cmake --build build/examples --target train_lm
//   build/examples/train_lm TEXT RUN
//
// TEXT is a folder with train.txt and dev.txt: UTF-8, one sentence per line, spaces between words.
// RUN is the output folder, with vocabulary and checkpoint. The same command resumes a run that was
// killed. Options follow as NAME=VALUE; struct Options lists them.
//
// By default, model and training are those of configs/small/moe-32.toml. A run on one thread
// (OMP_NUM_THREADS=1) is bitwise identical to the run of the following command, also if it was
// killed and resumed:
//
//   moe-lab train small/moe-32 data.corpus=TEXT num_threads=1
//
// Python writes a corpus, such as the built-in one, to an existing folder TEXT:
//
//   from moe_lab.data import load_corpus
//   corpus = load_corpus("builtin")
//   for part in ("train", "dev", "test"):
//       with open(f"TEXT/{part}.txt", "w") as file:
//           file.writelines(" ".join(words) + "\n" for words in getattr(corpus, part))
//
// With this text, the program prints:
//
//   data    8000 entries in the vocabulary, 825444 training tokens, 322 batches
//   step 50/1200, train nll 7.563, aux 0.001507, words/s ..., ... s left
//   ...
//   step 200/1200, dev nll 4.837, ppl 126
//   ...
//   step 1200/1200, dev nll 4.091, ppl 59.78
#include <moe_ext/moe_ext.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "streams.h"
#include "text.h"

namespace fs = std::filesystem;
namespace nn = torch::nn;

// ---- Options

// The options, named as in configs/small/moe-32.toml, without the section.
struct Options {
  int64_t seed = 1, steps = 1200;
  int64_t vocab_size = 8000, tokens_per_batch = 2560;
  int64_t d_model = 128, num_experts = 32, k = 4, hidden_size = 256;
  double dropout = 0.1, w_importance = 0.1, w_load = 0.1;
  double learning_rate = 8e-3, clip_norm = 1;
  int64_t warmup_steps = 200;
  int64_t log_every = 50, eval_every = 200, save_every = 200;
  std::string init;  // file of torch.save(dict(model.state_dict()), path); "": random weights

  // Calls f(name, value) for each option.
  template <class F>
  void for_each(F f) {
    f("seed", seed), f("steps", steps), f("vocab_size", vocab_size);
    f("tokens_per_batch", tokens_per_batch), f("d_model", d_model), f("num_experts", num_experts);
    f("k", k), f("hidden_size", hidden_size), f("dropout", dropout);
    f("w_importance", w_importance), f("w_load", w_load), f("learning_rate", learning_rate);
    f("clip_norm", clip_norm), f("warmup_steps", warmup_steps), f("log_every", log_every);
    f("eval_every", eval_every), f("save_every", save_every), f("init", init);
  }

  // Sets an option from "name=value".
  void set(const std::string& argument) {
    const auto equals = std::min(argument.find('='), argument.size());
    bool valid = false;
    for_each([&](const std::string& name, auto& value) {
      if (argument.compare(0, equals, name) == 0) {
        std::istringstream stream(argument.substr(std::min(equals + 1, argument.size())));
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
          value = stream.str(), valid = true;
        } else {
          valid = stream >> value && stream.peek() == EOF;
        }
      }
    });
    TORCH_CHECK_VALUE(valid, "an option must be NAME=VALUE with a name of struct Options, got ",
                      argument);
    const auto least = std::min(
        {steps, tokens_per_batch, d_model, num_experts, k, hidden_size, warmup_steps, log_every});
    TORCH_CHECK_VALUE(least >= 1 && std::min({seed, eval_every, save_every}) >= 0 &&
                          vocab_size >= 3 && learning_rate > 0 && clip_norm >= 0,
                      "learning_rate must be above 0, clip_norm, seed, eval_every and save_every "
                      "at least 0, vocab_size at least 3, and other whole numbers at least 1, got ",
                      argument);
  }
};

// ---- Model

// Fills a weight with uniform random values of variance 1 / fan_in.
void uniform_(Tensor weight, int64_t fan_in) {
  const double bound = std::sqrt(3.0 / static_cast<double>(fan_in));
  nn::init::uniform_(std::move(weight), -bound, bound);
}

nn::Embedding make_embedding(int64_t vocab_size, int64_t d_model) {
  nn::Embedding embedding(vocab_size, d_model);
  nn::init::normal_(embedding->weight, 0, 1 / std::sqrt(d_model));
  return embedding;
}

nn::Linear make_softmax(int64_t d_model, int64_t vocab_size) {
  nn::Linear softmax(d_model, vocab_size);
  uniform_(softmax->weight, d_model);
  nn::init::zeros_(softmax->bias);
  return softmax;
}

nn::LSTM make_lstm(int64_t d_model) {
  nn::LSTM lstm(nn::LSTMOptions(d_model, d_model).batch_first(true));
  for (auto& item : lstm->named_parameters()) {
    if (item.value().dim() == 2) {
      uniform_(item.value(), 2 * d_model);
    } else {
      nn::init::zeros_(item.value());
    }
  }
  // torch orders the gates i, f, j, o. With a forget gate that is open, the cell keeps its state.
  torch::NoGradGuard no_grad;
  lstm->named_parameters()["bias_ih_l0"].slice(0, d_model, 2 * d_model).fill_(1);
  return lstm;
}

// Makes a module with one child, to name the parameters as in Python.
nn::ModuleDict named(const std::string& name, const std::shared_ptr<nn::Module>& child) {
  return nn::ModuleDict(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{name, child}});
}

// Embedding, LSTM, mixture of experts, LSTM and softmax (Appendix C.1). The output of every layer
// is added to its input. The parameters are named as in Python.
class LanguageModelImpl : public nn::Module {
 public:
  LanguageModelImpl(const Options& options, int64_t vocab_size, const at::Generator& noise)
      : embedding(make_embedding(vocab_size, options.d_model)),
        softmax(make_softmax(options.d_model, vocab_size)),
        dropout(options.dropout),
        first(make_lstm(options.d_model)),
        second(make_lstm(options.d_model)),
        moe(moe_ext::nn::MoEOptions(options.d_model, options.num_experts, options.k)
                .hidden_sizes(std::vector<int64_t>{options.hidden_size})
                .w_importance(options.w_importance)
                .w_load(options.w_load)
                .generator(noise)) {
    register_module("embedding", embedding);
    register_module("softmax", softmax);
    register_module("dropout", dropout);
    register_module("layers",
                    nn::ModuleList(named("lstm", first.ptr()), moe, named("lstm", second.ptr())));
  }

  // Computes the input of the softmax, [B, S, D].
  std::tuple<Tensor, moe_ext::nn::MoEAux> forward(const Batch& batch) {
    Tensor h = dropout(embedding(batch.inputs));
    h = h + dropout(std::get<0>(first(h)));
    auto [y, aux] = moe(h, batch.mask);
    h = h + dropout(y.sigmoid());
    h = h + dropout(std::get<0>(second(h)));
    return {h, aux};
  }

  // Returns the nats, summed over the targets of a batch, and the balancing losses.
  std::tuple<Tensor, Tensor> loss(const Batch& batch) {
    auto [h, aux] = forward(batch);
    return {nll(h, batch, "sum"), aux.loss};
  }

  // Returns the nats of each target of a batch, without gradient.
  Tensor token_nll(const Batch& batch) { return nll(std::get<0>(forward(batch)), batch, "none"); }

 private:
  Tensor nll(const Tensor& h, const Batch& batch, std::string_view reduction) {
    return moe_ext::ops::linear_cross_entropy(
        h.index({batch.mask}), softmax->weight, batch.targets.index({batch.mask}),
        {.linear_bias = softmax->bias, .reduction = reduction});
  }

  nn::Embedding embedding;
  nn::Linear softmax;
  nn::Dropout dropout;
  nn::LSTM first, second;
  moe_ext::nn::MoE moe;
};
TORCH_MODULE(LanguageModel);

// ---- Training

volatile std::sig_atomic_t stopped = 0;  // whether Ctrl-C or SIGTERM came

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Prints a number as moe-lab train does, but without thousands separators.
std::string shown(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), value >= 1000 ? "%.0f" : "%.4g", value);
  return text.data();
}

// Trains a model. The trainer is itself a module, whose parameters and buffers are the whole state
// of the run: its state_dict() is the checkpoint.
class Trainer : public nn::Module {
 public:
  Trainer(const Options& options, const fs::path& text, const fs::path& run)
      : options_(options),
        vocabulary_(text / "train.txt", options.vocab_size),
        train_(text / "train.txt", vocabulary_),
        dev_(text / "dev.txt", vocabulary_),
        checkpoint_(run / "checkpoint.pt"),
        dropout_generator_(at::detail::getDefaultCPUGenerator()),
        // A generator of its own: models with and without a mixture get the same dropout masks.
        noise_generator_(at::detail::createCPUGenerator(seed("noise", 0, 0))) {
    torch::manual_seed(seed("weights"));
    model_ = LanguageModel(options, vocabulary_.words.size(), noise_generator_);
    register_module("model", model_);
    if (!options.init.empty()) {
      moe_ext::load_state_dict(*model_, moe_ext::read_state_dict(options.init));
    }
    torch::manual_seed(seed("dropout", 0, 0));

    parameters_ = model_->parameters();
    for (const Tensor& parameter : parameters_) {
      const auto index = std::to_string(exp_avg_.size());
      const auto zeros = torch::zeros_like(parameter, torch::requires_grad(false));
      exp_avg_.push_back(register_buffer("exp_avg_" + index, zeros));
      exp_avg_sq_.push_back(register_buffer("exp_avg_sq_" + index, zeros.clone()));
      adam_step_.push_back(register_buffer("adam_step_" + index, torch::zeros({})));
    }
    dropout_state_ = register_buffer("dropout_state", dropout_generator_.get_state());
    noise_state_ = register_buffer("noise_state", noise_generator_.get_state());
    position_ = register_buffer("position", torch::zeros({4}, torch::kInt64));

    // A run resumes only with its own text and options; steps and intervals may change.
    std::ostringstream facts;
    options_.for_each([&](const std::string& name, const auto& value) {
      const bool may_change = name == "steps" || name.find("_every") != name.npos;
      if (!may_change) facts << name << '=' << value << ' ';
    });
    facts.write(static_cast<const char*>(train_.stream.const_data_ptr()), train_.stream.nbytes());
    fingerprint_ = static_cast<int64_t>(sha256(facts.str()));

    fs::create_directories(run);
    if (fs::exists(checkpoint_)) resume();
    std::ofstream words(run / "vocabulary.txt");
    for (const auto& word : vocabulary_.words) words << word << '\n';
    TORCH_CHECK(words.flush(), "cannot write ", run / "vocabulary.txt");
  }

  // Trains until the last step, or until a signal; then saves a checkpoint.
  void run() {
    for (const int signal : {SIGINT, SIGTERM}) {
      std::signal(signal, [](int number) {
        stopped = 1;
        std::signal(number, SIG_DFL);  // a second signal ends the program at once
      });
    }
    auto batches = epoch_batches();
    std::cout << "data    " << vocabulary_.words.size() << " entries in the vocabulary, "
              << train_.num_tokens() << " training tokens, " << batches.size() << " batches\n";
    if (step_) std::cout << "resume  from step " << step_ << " of " << options_.steps << '\n';

    const auto due = [&](int64_t every) {
      return step_ == options_.steps || (every > 0 && step_ % every == 0);
    };
    const auto begin = std::chrono::steady_clock::now();
    const int64_t begin_step = step_;
    while (step_ < options_.steps && !stopped) {
      if (batch_ == static_cast<int64_t>(batches.size())) {
        ++epoch_, batch_ = 0;
        batches = epoch_batches();
      }
      train_step(Batch(train_, batches[batch_++]));
      if (due(options_.log_every)) {
        const double left = seconds_since(begin) / (step_ - begin_step) * (options_.steps - step_);
        std::cout << "step " << step_ << '/' << options_.steps << ", train nll "
                  << shown(window_.nll / window_.tokens) << ", aux "
                  << shown(window_.aux / window_.tokens) << ", words/s "
                  << shown(window_.tokens / window_.seconds) << ", " << std::llround(left)
                  << " s left" << std::endl;
        window_ = {};
      }
      if (due(options_.eval_every)) {
        const double nll = evaluate();
        std::cout << "step " << step_ << '/' << options_.steps << ", dev nll " << shown(nll)
                  << ", ppl " << shown(std::exp(nll)) << std::endl;
      }
      if (due(options_.save_every)) save();
    }
    if (step_ < options_.steps) {
      save();
      std::cout << "stopped at step " << step_ << "; the same command resumes the run\n";
    }
  }

 private:
  template <class... Purpose>
  uint64_t seed(const Purpose&... purpose) const {
    return mixed_seed(options_.seed, purpose...);
  }

  std::vector<Tensor> epoch_batches() const {
    const auto generator = at::detail::createCPUGenerator(seed(epoch_));
    return make_batches(train_, options_.tokens_per_batch, generator);
  }

  // Makes one step of Adam on the mean loss over the tokens of a batch.
  void train_step(const Batch& batch) {
    const auto begin = std::chrono::steady_clock::now();
    model_->train();
    const auto num_tokens = batch.mask.sum().item<int64_t>();
    const auto [nll, aux] = model_->loss(batch);
    (nll / num_tokens + aux).backward();
    const double norm =
        options_.clip_norm > 0 ? nn::utils::clip_grad_norm_(parameters_, options_.clip_norm) : 0;
    window_.nll += nll.item<double>();
    window_.aux += aux.item<double>() * num_tokens;
    window_.tokens += num_tokens;
    TORCH_CHECK(std::isfinite(window_.nll + window_.aux + norm),
                "the loss or the gradient of step ", step_ + 1,
                " is not finite; lower learning_rate, and start a new run");

    // Linear warm-up, then decay with the inverse square root of the step (Appendix C.1).
    const double t = static_cast<double>(step_ + 1), warmup = options_.warmup_steps;
    const double lr = options_.learning_rate * std::min(t / warmup, std::pow(warmup / t, 0.5));
    std::vector<Tensor> grads;
    for (const Tensor& parameter : parameters_) grads.push_back(parameter.grad());
    torch::NoGradGuard no_grad;
    for (Tensor& step : adam_step_) step += 1;
    at::_fused_adam_(parameters_, grads, exp_avg_, exp_avg_sq_, {}, adam_step_, lr, /*beta1=*/0.9,
                     /*beta2=*/0.98, /*weight_decay=*/0, /*eps=*/1e-9, /*amsgrad=*/false,
                     /*maximize=*/false);
    model_->zero_grad();
    ++step_;
    window_.seconds += seconds_since(begin);
  }

  // Returns the nats per token of dev.txt, without dropout and noise.
  double evaluate() {
    const c10::InferenceMode guard;
    model_->eval();
    Tensor sum = torch::zeros({dev_.starts.size(0) - 1}, torch::kFloat64);  // by sentence
    for (const Tensor& sentences : make_batches(dev_, options_.tokens_per_batch)) {
      const Batch batch(dev_, sentences);
      const Tensor sentence = sentences.unsqueeze(1).expand_as(batch.mask).index({batch.mask});
      sum.index_add_(0, sentence, model_->token_nll(batch).to(torch::kFloat64));
    }
    return sum.sum().item<double>() / dev_.num_tokens();
  }

  void save() {
    dropout_state_.copy_(dropout_generator_.get_state());
    noise_state_.copy_(noise_generator_.get_state());
    position_.copy_(torch::tensor({step_, epoch_, batch_, fingerprint_}));
    // The file is replaced as a whole: a kill at any moment leaves the old or the new checkpoint.
    moe_ext::write_state_dict(moe_ext::state_dict(*this), checkpoint_);
  }

  void resume() {
    const auto values = moe_ext::read_state_dict(checkpoint_);
    const auto found = values.find("position");
    TORCH_CHECK_VALUE(found != values.end() && found->second[3].item<int64_t>() == fingerprint_,
                      "text and options must be those of the run in ", checkpoint_.parent_path(),
                      "; give the original text and options, or another folder for a new run");
    moe_ext::load_state_dict(*this, values);
    dropout_generator_.set_state(dropout_state_);
    noise_generator_.set_state(noise_state_);
    step_ = position_[0].item<int64_t>();
    epoch_ = position_[1].item<int64_t>();
    batch_ = position_[2].item<int64_t>();
  }

  Options options_;
  Vocabulary vocabulary_;
  Text train_, dev_;
  fs::path checkpoint_;
  int64_t fingerprint_;
  int64_t step_ = 0, epoch_ = 0, batch_ = 0;  // completed steps, and the place of the next batch
  struct {
    double nll = 0, aux = 0, seconds = 0;
    int64_t tokens = 0;
  } window_;  // sums since the last log line

  at::Generator dropout_generator_, noise_generator_;
  LanguageModel model_ = nullptr;
  std::vector<Tensor> parameters_, exp_avg_, exp_avg_sq_, adam_step_;
  Tensor dropout_state_, noise_state_, position_;  // the values of the checkpoint
};

int main(int argc, char** argv) try {
  require_stdout();
  TORCH_CHECK_VALUE(argc >= 3, "usage: train_lm TEXT RUN [OPTION=VALUE ...]");
  Options options;
  for (int i = 3; i < argc; ++i) options.set(argv[i]);
  Trainer(options, argv[1], argv[2]).run();
  require_written();
} catch (const c10::Error& error) {
  std::cerr << "train_lm: " << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << "train_lm: " << error.what() << '\n';
  return 1;
}
