#pragma once

#include <c10/util/Exception.h>

#include "emulation.h"

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess, "emulated: ", #call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)  // emulation::launch throws
