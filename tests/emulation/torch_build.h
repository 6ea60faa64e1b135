// Replaces csrc/cuda_host/torch_build.h: tests set the versions.
#pragma once

namespace moe_ext {

struct TorchBuild {
  int64_t release, cuda;
};

inline TorchBuild torch_build() {
  return {.release = emulation::machine().torch_release, .cuda = emulation::machine().torch_cuda};
}

}  // namespace moe_ext
