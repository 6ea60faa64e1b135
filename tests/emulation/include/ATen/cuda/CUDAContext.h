#pragma once

#include "emulation.h"

namespace at::cuda {

inline cudaStream_t getCurrentCUDAStream() { return nullptr; }

struct DeviceProperties {
  int major;  // 8: the newest without torch's grouped GEMM
};

inline DeviceProperties device_properties{8};
inline const DeviceProperties* getCurrentDeviceProperties() { return &device_properties; }

}  // namespace at::cuda
