// The text of a language model: vocabulary, word ids and batches.
//
// Vocabulary and order of the batches are those of moe-lab train.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "words.h"

using torch::Tensor;

// ---- Seeds

// Returns the first 56 bits of the SHA-256 of a text.
inline uint64_t sha256(std::string text) {
  // The constants are the first 32 bits of the fractional parts of roots of prime numbers.
  const auto fraction = [](double x) { return static_cast<uint32_t>(std::ldexp(x - int(x), 32)); };
  std::array<uint32_t, 64> constant;
  std::array<uint32_t, 8> hash;
  for (int n = 2, i = 0; i < 64; ++n) {
    int divisor = 2;
    while (n % divisor) ++divisor;
    if (divisor < n) continue;
    if (i < 8) hash[i] = fraction(std::sqrt(n));
    constant[i++] = fraction(std::cbrt(n));
  }
  const uint64_t bits = 8 * text.size();
  text += '\x80';
  text.resize((text.size() + 8 + 63) / 64 * 64);
  for (int i = 0; i < 8; ++i) text[text.size() - 1 - i] = static_cast<char>(bits >> 8 * i);

  const auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  for (size_t begin = 0; begin < text.size(); begin += 64) {
    std::array<uint32_t, 64> w{};
    for (int i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<uint8_t>(text[begin + i]);
    for (int i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + (turn(x, 7) ^ turn(x, 18) ^ x >> 3) + w[i - 7] +
             (turn(y, 17) ^ turn(y, 19) ^ y >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = hash;
    for (int i = 0; i < 64; ++i) {
      const uint32_t t =
          h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + constant[i] + w[i];
      const uint32_t u = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t, d = c, c = b, b = a, a = t + u;
    }
    const std::array<uint32_t, 8> sum = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) hash[i] += sum[i];
  }
  return static_cast<uint64_t>(hash[0]) << 24 | hash[1] >> 8;
}

// Hashes a seed and its purpose, so that similar arguments give unrelated seeds.
template <class... Purpose>
uint64_t mixed_seed(int64_t seed, const Purpose&... purpose) {
  std::ostringstream text;
  text << seed;
  ((text << ' ' << purpose), ...);
  return sha256(text.str());
}

// ---- Text

// Calls f with the words of each line of a file; skips blank lines.
template <class F>
void for_each_sentence(const std::filesystem::path& path, F f) {
  std::ifstream file(path);
  TORCH_CHECK_VALUE(file, "TEXT must be a folder with train.txt and dev.txt, cannot read ", path);
  bool first = true;
  for (std::string line; std::getline(file, line); first = false) {
    if (first) remove_byte_order_mark(line);
    const auto words = words_of(line);
    if (!words.empty()) f(words);
  }
}

// The most frequent words, numbered by decreasing frequency; ties are ordered by spelling. <unk>
// stands for every other word. </s> is the end of a sentence, and the input before its first word.
struct Vocabulary {
  std::vector<std::string> words;
  std::unordered_map<std::string, int64_t> index;

  Vocabulary(const std::filesystem::path& path, int64_t max_size) {
    std::unordered_map<std::string, int64_t> counts;
    int64_t num_sentences = 0;
    for_each_sentence(path, [&](const std::vector<std::string>& sentence) {
      ++num_sentences;
      for (const auto& word : sentence) ++counts[word];
    });
    TORCH_CHECK_VALUE(!counts.count("</s>"), path, " must not contain </s>");
    int64_t num_unknown = counts["<unk>"];
    counts.erase("<unk>");
    TORCH_CHECK_VALUE(!counts.empty(), path, " must contain at least one word");
    TORCH_CHECK_VALUE(max_size >= 3, "vocab_size must be at least 3, got ", max_size);

    std::vector<std::pair<int64_t, std::string>> ranked;  // with the negative count
    for (const auto& [word, count] : counts) ranked.emplace_back(-count, word);
    std::sort(ranked.begin(), ranked.end());
    for (; static_cast<int64_t>(ranked.size()) > max_size - 2; ranked.pop_back()) {
      num_unknown -= ranked.back().first;
    }
    ranked.emplace_back(-num_unknown, "<unk>");
    ranked.emplace_back(-num_sentences, "</s>");
    std::sort(ranked.begin(), ranked.end());
    for (const auto& entry : ranked) {
      index[entry.second] = static_cast<int64_t>(words.size());
      words.push_back(entry.second);
    }
  }
};

// Sentences as word ids. Sentence i has the inputs starts[i] <= j < starts[i + 1] of the stream.
// Their targets are one place later.
struct Text {
  Tensor stream;  // [1 + words + sentences] int64, </s> before the first sentence and after each
  Tensor starts;  // [sentences + 1] int64

  Text(const std::filesystem::path& path, const Vocabulary& vocabulary) {
    const int64_t unknown = vocabulary.index.at("<unk>"), end = vocabulary.index.at("</s>");
    std::vector<int64_t> ids = {end}, begins = {0};
    for_each_sentence(path, [&](const std::vector<std::string>& sentence) {
      for (const auto& word : sentence) {
        TORCH_CHECK_VALUE(word != "</s>", path, " must not contain </s>");
        const auto found = vocabulary.index.find(word);
        ids.push_back(found == vocabulary.index.end() ? unknown : found->second);
      }
      begins.push_back(static_cast<int64_t>(ids.size()));
      ids.push_back(end);
    });
    TORCH_CHECK_VALUE(begins.size() > 1, path, " must contain a sentence");
    stream = torch::tensor(ids);
    starts = torch::tensor(begins);
  }

  // The number of predictions: all words, and the end of each sentence.
  int64_t num_tokens() const { return stream.size(0) - 1; }
};

// Splits the sentences, sorted by length, into batches of about tokens_per_batch predictions.
//
//   generator: shuffles sentences of equal length, and the batches; absent: from short to long.
//
// Returns the sentences of each batch.
inline std::vector<Tensor> make_batches(
    const Text& text, int64_t tokens_per_batch,
    const std::optional<at::Generator>& generator = std::nullopt) {
  const Tensor length = text.starts.diff();
  Tensor rows = torch::arange(length.size(0));
  if (generator) rows = torch::randperm(length.size(0), generator);
  rows = rows.index({length.index({rows}).argsort(/*stable=*/true)});
  // Every batch has an equal share of the tokens. A sentence is in the share of its first token.
  const Tensor sorted = length.index({rows});
  const double ratio = static_cast<double>(text.num_tokens()) / tokens_per_batch;
  const auto num_shares = std::max<int64_t>(1, std::llrint(ratio));
  const Tensor share = ((sorted.cumsum(0) - sorted) * num_shares).floor_divide(text.num_tokens());
  const Tensor sizes = std::get<2>(torch::unique_consecutive(share, false, /*counts=*/true));
  std::vector<Tensor> batches =
      rows.split_with_sizes({sizes.const_data_ptr<int64_t>(), static_cast<size_t>(sizes.numel())});
  if (!generator) return batches;

  std::vector<Tensor> shuffled;
  const Tensor order = torch::randperm(static_cast<int64_t>(batches.size()), generator);
  for (int64_t i = 0; i < order.numel(); ++i) {
    shuffled.push_back(batches[order[i].item<int64_t>()]);
  }
  return shuffled;
}

// A batch of B sentences, padded to the S predictions of the longest sentence.
struct Batch {
  Tensor inputs, targets;  // [B, S] int64
  Tensor mask;             // [B, S] bool, false at padding

  Batch(const Text& text, const Tensor& sentences) {
    const Tensor begin = text.starts.index({sentences}).unsqueeze(1);
    const Tensor length = text.starts.index({sentences + 1}).unsqueeze(1) - begin;
    const Tensor position = torch::arange(length.max().item<int64_t>());
    mask = position < length;
    const Tensor where = torch::where(mask, begin + position, 0);  // stream[0] is </s>
    inputs = text.stream.index({where});
    targets = torch::where(mask, text.stream.index({where + 1}), text.stream[0]);
  }
};
