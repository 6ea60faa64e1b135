// Splits text into words, as moe_lab does: lines of UTF-8, with any white space of Unicode.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

// Returns whether a code point is white space for Python's str.split.
inline bool is_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

// Removes a byte order mark from the first line of a text.
inline void remove_byte_order_mark(std::string& first_line) {
  if (first_line.rfind("\xef\xbb\xbf", 0) == 0) first_line.erase(0, 3);
}

// Returns the words of a line.
inline std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  std::string word;
  const auto end_word = [&] {
    if (!word.empty()) words.push_back(word);
    word.clear();
  };
  for (size_t begin = 0, size = 0; begin < line.size(); begin += size) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(line[begin + i]); };
    const uint32_t first = byte(0);
    size = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    bool valid = (first < 0x80 || first >= 0xc2) && first < 0xf5 && begin + size <= line.size();
    uint32_t c = size == 1 ? first : first & (0xff >> (size + 1));
    for (size_t i = 1; valid && i < size; ++i) {
      valid = byte(i) >> 6 == 0b10;
      c = c << 6 | (byte(i) & 0x3f);
    }
    constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    valid = valid && c >= kSmallest[size] && c < 0x110000 && (c < 0xd800 || c > 0xdfff);
    TORCH_CHECK_VALUE(valid, "the text must be UTF-8, got the byte ", first, " in: ", line);
    is_space(c) ? end_word() : void(word.append(line, begin, size));
  }
  end_word();
  return words;
}
