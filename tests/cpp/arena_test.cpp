// The workspaces of the CPU kernels.
#include "../../csrc/cpu/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace {

using moe_ext::cpu::Arena;

struct Workspace {
  explicit Workspace(Arena& arena)
      : bytes(arena.take<uint8_t>(3)),
        none(arena.take<float>(0)),
        doubles(arena.take<double>(9)),
        floats(arena.take<float>(16)) {}

  uint8_t* bytes;
  float* none;
  double* doubles;
  float* floats;
};

TEST(Arena, TakesWhatItCounts) {
  Arena counter;
  const Workspace counted(counter);
  EXPECT_EQ(counted.floats, nullptr);
  EXPECT_EQ(counter.size() % 64, 0);
  alignas(64) uint8_t memory[1024];
  Arena arena(memory, counter.size());
  const Workspace workspace(arena);
  EXPECT_EQ(arena.size(), counter.size());
  for (void* array : {static_cast<void*>(workspace.bytes), static_cast<void*>(workspace.doubles),
                      static_cast<void*>(workspace.floats)}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(array) % 64, 0);
  }
  EXPECT_EQ(workspace.bytes, memory);
  EXPECT_GE(reinterpret_cast<uint8_t*>(workspace.doubles), memory + 64);
  EXPECT_GE(reinterpret_cast<uint8_t*>(workspace.floats), memory + 64 + 128);
  EXPECT_LE(reinterpret_cast<uint8_t*>(workspace.floats + 16), memory + counter.size());
}

TEST(Arena, RefusesMoreThanItHas) {
  Arena counter;
  counter.take<float>(16);
  alignas(64) uint8_t memory[1024];
  Arena arena(memory, counter.size());
  EXPECT_NE(arena.take<float>(16), nullptr);
  EXPECT_THROW(arena.take<float>(1), std::logic_error);
}

#if defined(__SANITIZE_ADDRESS__)
TEST(ArenaDeathTest, AddressSanitizerSeesTheEndOfAnArray) {
  alignas(64) uint8_t memory[1024];
  Arena arena(memory, sizeof memory);
  float* const first = arena.take<float>(5);
  arena.take<float>(5);
  EXPECT_DEATH(*const_cast<volatile float*>(first + 5) = 1, "use-after-poison");
}
#endif

}  // namespace
