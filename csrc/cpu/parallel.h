// Parallel loops. Their results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "subnormals.h"
#include "threads.h"
#include "vectorize.h"

namespace moe_ext::cpu {

// Calls body(begin, end) in parallel on ranges that cover [0, size). An item costs `work_per_item`
// element accesses; a range costs at least kMinWork.
template <typename Body>
void parallel_for(int64_t size, int64_t work_per_item, const Body& body) {
  constexpr int64_t kMinWork = 16384;
  if (size == 0) return;
  isa();  // a bad MOE_EXT_ISA must raise here, not in the parallel region
  const int64_t grain = std::max<int64_t>(1, kMinWork / std::max<int64_t>(1, work_per_item));
  run_in_parallel(size, grain, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    body(begin, end);
  });
}

// Sums over each group of tokens into one row of `sum`, [groups, columns]: add(begin, end, row)
// adds the tokens [begin, end) to `row` in order. Group g has the tokens bounds[g] <= t < bounds[g
// + 1]. The chunk size depends on shapes only, and the chunks of a group are added in order. The
// sums therefore do not depend on the number of threads.
template <typename acc_t, typename Add>
void sum_over_tokens(const int64_t* bounds, int64_t num_groups, int64_t num_columns,
                     int64_t work_per_token, acc_t* sum, const Add& add) {
  // A chunk must cost at least as much as adding its row to the total.
  const int64_t size = std::max<int64_t>(128, num_columns / std::max<int64_t>(1, work_per_token));
  // The first chunk of a group is summed in the group's row. The other chunks have extra rows after
  // the rows of all groups.
  struct Chunk {
    int64_t group, begin, end, row;
  };
  std::vector<Chunk> chunks;
  int64_t num_rows = num_groups;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = bounds[group];
    const int64_t end = bounds[group + 1];
    if (first == end) std::fill_n(sum + group * num_columns, num_columns, acc_t(0));
    for (int64_t begin = first; begin < end; begin += size) {
      const int64_t row = begin == first ? group : num_rows++;
      chunks.push_back({group, begin, std::min(end, begin + size), row});
    }
  }
  if (chunks.empty()) return;
  const Array<acc_t> others((num_rows - num_groups) * num_columns);
  const auto row_data = [&](int64_t row) {
    return row < num_groups ? sum + row * num_columns
                            : others.data() + (row - num_groups) * num_columns;
  };
  const int64_t num_chunks = chunks.size();
  const int64_t tokens_per_chunk = bounds[num_groups] / num_chunks;
  parallel_for(num_chunks, tokens_per_chunk * work_per_token, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      auto* row = row_data(chunks[c].row);
      std::fill_n(row, num_columns, acc_t(0));
      add(chunks[c].begin, chunks[c].end, row);
    }
  });
  for (const Chunk& chunk : chunks) {
    if (chunk.row < num_groups) continue;
    auto* total = row_data(chunk.group);
    const auto* row = row_data(chunk.row);
    for (int64_t i = 0; i < num_columns; ++i) total[i] += row[i];
  }
}

}  // namespace moe_ext::cpu
