// What the GEMMs need to know of the installed torch. tests/emulation/torch_build.h replaces it.
#pragma once

#include <ATen/Context.h>
#include <torch/version.h>

namespace moe_ext {

struct TorchBuild {
  int64_t release;  // 2014 for 2.14
  int64_t cuda;     // 13030 for CUDA 13.3; 0 without CUDA
};

inline TorchBuild torch_build() {
  return {.release = 1000 * TORCH_VERSION_MAJOR + TORCH_VERSION_MINOR,
          .cuda = at::Context::hasCUDART() ? at::Context::versionCUDART() : 0};
}

}  // namespace moe_ext
