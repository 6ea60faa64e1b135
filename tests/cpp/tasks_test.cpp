// The tasks of a parallel loop that wait for each other, and tasks that fail. A failed task must
// not leave another one waiting: ctest ends a test that hangs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/backward_schedule.h"
#include "../../csrc/cpu/block_scheduler.h"
#include "../../csrc/cpu/threads.h"

namespace {

using namespace moe_ext::cpu;

constexpr int64_t kThreads[] = {1, 2, 3, 8};
constexpr int64_t kNoTask = -1;

int64_t num_threads_of_test = 1;

// A pool that starts a thread for each range.
void on_threads(int64_t size, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
  const int64_t parts = std::clamp<int64_t>(size / grain, 1, num_threads_of_test);
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part) {
    threads.emplace_back(body, context, part * size / parts, (part + 1) * size / parts);
  }
  for (std::thread& thread : threads) thread.join();
}

// Sets the number of threads of the kernels during a test.
class Threads : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    num_threads_of_test = GetParam();
    set_thread_pool([] { return num_threads_of_test; }, on_threads);
  }
};

INSTANTIATE_TEST_SUITE_P(Tasks, Threads, testing::ValuesIn(kThreads));

// Calls body(task) for all tasks, except that the task `failing` throws an error.
template <typename Body>
void run_tasks(int64_t num_tasks, Progress* progress, int64_t failing, const Body& body) {
  const auto nothing = [](Arena&) { return 0; };
  for_each_task(num_tasks, progress, num_threads(), nothing, [&](int64_t task, int) {
    if (task == failing) throw std::runtime_error(std::to_string(task));
    body(task);
  });
}

// Returns the text of the exception of `run`, or an empty text.
template <typename Run>
std::string error_of(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST_P(Threads, RunEveryTaskOnce) {
  for (const int64_t num_tasks : {0, 1, 7, 1000}) {
    std::vector<std::atomic<int>> calls(num_tasks);
    run_tasks(num_tasks, nullptr, kNoTask, [&](int64_t task) { ++calls[task]; });
    for (const auto& number : calls) EXPECT_EQ(number, 1);
  }
}

TEST_P(Threads, ThrowTheErrorOfATask) {
  for (int64_t failing = 0; failing < 100; ++failing) {
    EXPECT_EQ(error_of([&] { run_tasks(100, nullptr, failing, [](int64_t) {}); }),
              std::to_string(failing));
  }
}

TEST_P(Threads, HaveAWorkspaceEach) {
  constexpr int64_t kTasks = 200, kSize = 100;
  std::vector<std::atomic<int>> sums(kTasks);
  for_each_task(
      kTasks, nullptr, num_threads(), [](Arena& arena) { return arena.take<int>(kSize); },
      [&](int64_t task, int* workspace) {
        std::fill_n(workspace, kSize, static_cast<int>(task));
        for (int i = 0; i < kSize; ++i) sums[task] += workspace[i];
      });
  for (int64_t task = 0; task < kTasks; ++task) EXPECT_EQ(sums[task], kSize * task);
}

// An error while a thread takes its workspace.
TEST_P(Threads, ThrowTheErrorOfAWorkspace) {
  std::atomic<int> calls{0};
  const std::string error = error_of([&] {
    const auto take = [&](Arena& arena) { return arena.take<int>(++calls == 1 ? 1 : 1000); };
    for_each_task(10, nullptr, num_threads(), take, [](int64_t, int*) {});
  });
  EXPECT_NE(error.find("is too small"), std::string::npos);
}

// Every task adds to all results in turn.
TEST_P(Threads, TakeTurns) {
  constexpr int kTasks = 12, kResults = 5;
  for (int64_t failing = kNoTask; failing < kTasks; ++failing) {
    Progress turns(kResults);
    std::vector<std::vector<int>> order(kResults);
    const std::string error = error_of([&] {
      run_tasks(kTasks, &turns, failing, [&](int64_t task) {
        for (int result = 0; result < kResults; ++result) {
          turns.in_turn(result, static_cast<int>(task),
                        [&] { order[result].push_back(static_cast<int>(task)); });
        }
      });
    });
    EXPECT_EQ(error, failing == kNoTask ? "" : std::to_string(failing));
    for (const auto& tasks : order) {
      // The tasks before the failed one may have been cancelled, and no later one had its turn.
      EXPECT_LE(tasks.size(), failing == kNoTask ? kTasks : failing);
      EXPECT_TRUE(failing != kNoTask || tasks.size() == kTasks);
      for (size_t i = 0; i < tasks.size(); ++i) EXPECT_EQ(tasks[i], i);
    }
  }
}

// A task fails while it has its turn.
TEST_P(Threads, FailInATurn) {
  constexpr int kTasks = 12;
  for (int failing = 0; failing < kTasks; ++failing) {
    Progress turns(1);
    const std::string error = error_of([&] {
      run_tasks(kTasks, &turns, kNoTask, [&](int64_t task) {
        turns.in_turn(0, static_cast<int>(task), [&] {
          if (task == failing) throw std::runtime_error("in a turn");
        });
      });
    });
    EXPECT_EQ(error, "in a turn");
  }
}

// Experts with 1, 4, 0, 2 and 3 blocks.
constexpr int64_t kOffsets[] = {0, 100, 2660, 2660, 3900, 5800};

TEST_P(Threads, ComputeGradientsAfterTheBlocks) {
  constexpr int64_t kParts = 3;
  const auto blocks = split_into_blocks(kOffsets, 5, 5800);
  const int64_t num_tasks = [&] {
    return BackwardSchedule(blocks, kParts, num_threads()).num_tasks();
  }();
  ASSERT_EQ(num_tasks, 1 + 4 + 1 + 2 + 3 + 3 * kParts);
  for (int64_t failing = kNoTask; failing < num_tasks; ++failing) {
    BackwardSchedule schedule(blocks, kParts, num_threads());
    ASSERT_NE(schedule.progress(), nullptr);
    std::vector<std::atomic<int64_t>> rows(5);
    std::vector<std::atomic<int>> parts(5);
    std::atomic<bool> in_order{true};
    const std::string error = error_of([&] {
      run_tasks(num_tasks, schedule.progress(), failing, [&](int64_t task) {
        schedule.run(
            task,
            [&](const Block& block, const SplitExpert* split) {
              rows[block.expert] += block.num_rows;
              if (split == nullptr) return;
              if (split->before != nullptr && parts[split->before->expert] != kParts) {
                in_order = false;  // the slot is in use
              }
            },
            [&](const SplitExpert& split, int64_t) {
              if (rows[split.expert] != split.num_rows) in_order = false;
              ++parts[split.expert];
            });
      });
    });
    EXPECT_TRUE(in_order);
    EXPECT_EQ(error, failing == kNoTask ? "" : std::to_string(failing));
    if (failing != kNoTask) continue;
    const int64_t expected[] = {100, 2560, 0, 1240, 1900};
    for (int expert = 0; expert < 5; ++expert) {
      EXPECT_EQ(rows[expert], expected[expert]);
      EXPECT_EQ(parts[expert], expert == 0 || expert == 2 ? 0 : kParts);
    }
  }
}

TEST(Blocks, LeaveThreadsIdle) {
  const auto idle = [](std::vector<int64_t> offsets, int64_t threads) {
    const auto num_experts = static_cast<int64_t>(offsets.size()) - 1;
    const auto blocks = split_into_blocks(offsets.data(), num_experts, offsets.back());
    return leaves_threads_idle(blocks, threads);
  };
  EXPECT_FALSE(idle({0, 0}, 4));
  EXPECT_FALSE(idle({0, 500}, 1));
  EXPECT_TRUE(idle({0, 1}, 2));
  EXPECT_FALSE(idle({0, 1, 1, 2}, 2));  // experts without rows take no time
  EXPECT_TRUE(idle({0, 1, 2, 3}, 2));
  EXPECT_FALSE(idle({0, 1, 2, 3, 4, 5}, 2));
  EXPECT_TRUE(idle({0, 300, 310}, 2));
  EXPECT_FALSE(idle({0, 1280}, 2));
  EXPECT_FALSE(idle({0, 1, 2, 3, 4, 5, 6, 7, 1000}, 2));  // many blocks: not examined
}

TEST(Blocks, HaveAtMostSomeRows) {
  const auto blocks = split_into_blocks(nullptr, 2, 400, /*most_rows=*/90);
  ASSERT_EQ(blocks.size(), 6);
  for (const Block& block : blocks) EXPECT_LE(block.num_rows, 67);
}

TEST(BackwardSchedule, DoesNotWaitWithoutSplitExperts) {
  const auto blocks = split_into_blocks(nullptr, 4, 400);
  EXPECT_EQ(BackwardSchedule(blocks, 3, 2).progress(), nullptr);
  const auto split = split_into_blocks(nullptr, 1, 4000);
  EXPECT_EQ(BackwardSchedule(split, 0, 2).progress(), nullptr);
}

}  // namespace
