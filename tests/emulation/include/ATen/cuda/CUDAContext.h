#pragma once

#include "emulation.h"

namespace at::cuda {

inline cudaStream_t getCurrentCUDAStream() { return nullptr; }

struct DeviceProperties {
  int major = 8;  // the newest without a grouped product of torch's
};

inline const DeviceProperties* getCurrentDeviceProperties() {
  static const DeviceProperties properties;
  return &properties;
}

}  // namespace at::cuda
