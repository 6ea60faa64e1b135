// The processor, as the choice of kernels sees it.
#pragma once

#include "isa.h"

namespace moe_ext::cpu {

// kAny is a vendor without rules of its own.
enum class Vendor { kAny, kAmd, kIntel };

struct Processor {
  Vendor vendor;
  Isa highest;  // it has the sets before it too
};

// Describes the processor of this machine. If it has AMX, asks the operating system for permission
// to use it.
Processor this_processor();

}  // namespace moe_ext::cpu
