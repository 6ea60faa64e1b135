// Serves a trained language model without Python. For each line of stdin, it prints the most
// probable next words, or the perplexity.
//
//     moe-lab export runs/moe-32 --output lm.pt2     # the model, for C++
//
//     prefix=$(python -m moe_ext.info --cmake-prefix)
//     cmake -S examples/cpp -B build/examples -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
//     cmake --build build/examples --target serve
//
//     echo "Return the number of" | build/examples/serve lm.pt2
//     build/examples/serve lm.pt2 --perplexity --threads 8 < sentences.txt
//
// A line is one sentence, or its beginning, with spaces between words. The lines of the output have
// the order of the lines of the input. A line of the output has the five most probable next words,
// or the perplexity of the sentence with its end. A thread works on one line at a time. With
// --perplexity, the perplexity of all sentences follows on stderr; moe-lab evaluate RUN --corpus
// sentences.txt computes the same number.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "streams.h"
#include "words.h"

struct Options {
  std::string package;
  bool perplexity = false;
  int64_t threads = std::max(1u, std::thread::hardware_concurrency());

  static Options parse(const std::vector<std::string>& arguments) {
    Options options;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = arguments[i];
      if (argument == "--perplexity") {
        options.perplexity = true;
      } else if (argument == "--threads") {
        const auto value = i + 1 < arguments.size() ? arguments[++i] : "nothing";
        char* end = nullptr;
        options.threads = std::strtol(value.c_str(), &end, 10);
        TORCH_CHECK_VALUE(*end == '\0' && options.threads >= 1 && options.threads <= 1024,
                          "--threads must be a whole number from 1 to 1024, got ", value);
      } else {
        TORCH_CHECK_VALUE(options.package.empty() && argument[0] != '-',
                          "usage: serve PACKAGE.pt2 [--perplexity] [--threads N], got ", argument);
        options.package = argument;
      }
    }
    TORCH_CHECK_VALUE(!options.package.empty(),
                      "usage: serve PACKAGE.pt2 [--perplexity] [--threads N], got no package");
    return options;
  }
};

// The words of a language model; a word's id is its position.
class Vocabulary {
 public:
  explicit Vocabulary(const std::string& lines) {
    std::istringstream stream(lines);
    for (std::string word; std::getline(stream, word);) {
      ids_.emplace(word, words_.size());
      words_.push_back(word);
    }
    TORCH_CHECK_VALUE(ids_.contains("</s>") && ids_.contains("<unk>"),
                      "the package must come from moe-lab export, got one without vocabulary");
  }

  const std::string& word(int64_t id) const { return words_.at(id); }
  int64_t end() const { return ids_.at("</s>"); }

  // The ids of </s> and of the words of a sentence.
  std::vector<int64_t> encode(const std::string& sentence) const {
    std::vector<int64_t> ids = {end()};
    for (const std::string& word : words_of(sentence)) {
      TORCH_CHECK_VALUE(word != "</s>", "a sentence must not contain </s>");
      const auto found = ids_.find(word);
      ids.push_back(found == ids_.end() ? ids_.at("<unk>") : found->second);
    }
    return ids;
  }

 private:
  std::vector<std::string> words_;
  std::unordered_map<std::string, int64_t> ids_;
};

// Negative log-likelihood in nats, and the number of predictions.
struct Likelihood {
  double nats = 0;
  int64_t words = 0, sentences = 0;

  double perplexity() const { return std::exp(nats / words); }
};

class LanguageModel {
 public:
  LanguageModel(const std::string& package, int64_t threads)
      : loader_(package, "model", /*run_single_threaded=*/false, /*num_runners=*/threads),
        vocabulary_(loader_.get_metadata()["vocabulary"]) {}

  // The five most probable words after the beginning of a sentence, with their probabilities.
  std::string next_words(const std::string& beginning) {
    const auto ids = vocabulary_.encode(beginning);
    const auto all = log_probabilities(ids)[-1].exp();
    const auto [probability, id] = all.topk(std::min<int64_t>(5, all.numel()));
    std::ostringstream text;
    for (int64_t i = 0; i < id.numel(); ++i) {
      char number[16];
      std::snprintf(number, sizeof(number), "%.4f", probability[i].item<float>());
      text << (i ? "  " : "") << vocabulary_.word(id[i].item<int64_t>()) << ' ' << number;
    }
    return text.str();
  }

  Likelihood likelihood(const std::string& sentence) {
    const auto ids = vocabulary_.encode(sentence);
    if (ids.size() == 1) return {};  // no sentence
    auto targets = torch::tensor(std::vector<int64_t>(ids.begin() + 1, ids.end()));
    targets = torch::cat({targets, torch::tensor({vocabulary_.end()})});
    const auto chosen = log_probabilities(ids).gather(1, targets.unsqueeze(1));
    return {-chosen.sum(torch::kDouble).item<double>(), static_cast<int64_t>(ids.size()), 1};
  }

 private:
  // [S, V], of the word after each of S words.
  torch::Tensor log_probabilities(const std::vector<int64_t>& ids) {
    return loader_.run({torch::tensor(ids).unsqueeze(0)}).at(0)[0];
  }

  torch::inductor::AOTIModelPackageLoader loader_;
  Vocabulary vocabulary_;
};

// Applies work(line) to the lines of stdin and show(result) to the results, in the order of the
// lines. Several threads work at once; one at a time shows.
template <class Work, class Show>
void for_each_line(int64_t num_threads, Work work, Show show) {
  std::mutex reading, showing;
  std::condition_variable turn;
  int64_t num_read = 0, num_shown = 0;

  const auto loop = [&] {
    torch::set_num_threads(1);  // of this thread: the threads work on different sentences
    while (true) {
      std::string line;
      int64_t number;
      {
        std::lock_guard lock(reading);
        if (!std::getline(std::cin, line)) return;
        number = num_read++;
        if (number == 0) remove_byte_order_mark(line);
      }
      decltype(work(line)) result;
      std::string error;
      try {
        result = work(line);
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      } catch (const std::exception& e) {
        error = e.what();
      }
      std::unique_lock lock(showing);
      turn.wait(lock, [&] { return num_shown == number; });
      if (!error.empty()) {
        std::cerr << "serve: line " << number + 1 << ": " << error << std::endl;
        std::_Exit(2);  // the other threads may wait for lines that never come
      }
      show(result);
      ++num_shown;
      turn.notify_all();
    }
  };

  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_threads; ++i) threads.emplace_back(loop);
  for (auto& thread : threads) thread.join();
}

int main(int argc, char** argv) {
  try {
    require_stdout();
    const auto options = Options::parse({argv + 1, argv + argc});
    LanguageModel model(options.package, options.threads);
    if (!options.perplexity) {
      const auto work = [&](const std::string& line) { return model.next_words(line); };
      for_each_line(options.threads, work,
                    [](const std::string& text) { std::cout << text << std::endl; });
      require_written();
      return 0;
    }

    Likelihood all;
    const auto work = [&](const std::string& line) { return model.likelihood(line); };
    for_each_line(options.threads, work, [&](const Likelihood& one) {
      if (one.sentences) std::printf("%.3f", one.perplexity());
      std::puts("");
      std::fflush(stdout);
      all.nats += one.nats, all.words += one.words, all.sentences += one.sentences;
    });
    require_written();
    TORCH_CHECK_VALUE(all.sentences, "stdin must have at least one sentence, got none");
    std::fprintf(stderr,
                 "perplexity %.3f  (%.4f nats per word, %ld words and ends of %ld sentences)\n",
                 all.perplexity(), all.nats / all.words, all.words, all.sentences);
  } catch (const c10::Error& error) {
    std::cerr << "serve: " << error.what_without_backtrace() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << '\n';
    return 2;
  }
}
