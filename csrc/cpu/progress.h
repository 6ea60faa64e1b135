// The progress of tasks that wait for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace moe_ext::cpu {

// Thrown by the waits of all other tasks after a task has failed.
struct Cancelled {};

// Counts finished pieces of work, for the tasks that wait for them.
class Progress {
 public:
  explicit Progress(int64_t num_counts) : counts_(num_counts) {}

  void advance(int64_t index) {
    counts_[index].fetch_add(1);
    counts_[index].notify_all();
  }

  // Waits until a count is at least `value`. Throws Cancelled if a task has failed.
  void wait(int64_t index, int value) {
    int now;
    while ((now = counts_[index].load()) < value) counts_[index].wait(now);
    if (now >= kFailed) throw Cancelled();
  }

  // Calls the bodies for an index one at a time, in the order of `turn` = 0, 1, ...
  template <typename Body>
  void in_turn(int64_t index, int turn, const Body& body) {
    wait(index, turn);
    body();
    advance(index);
  }

  // Ends all waits, those of now and later ones.
  void fail() {
    for (auto& count : counts_) {
      count.fetch_or(kFailed);
      count.notify_all();
    }
  }

 private:
  static constexpr int kFailed = 1 << 30;  // more than any count

  std::vector<std::atomic<int>> counts_;
};

}  // namespace moe_ext::cpu
