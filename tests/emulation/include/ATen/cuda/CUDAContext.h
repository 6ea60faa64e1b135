#pragma once

#include "emulation.h"

namespace at::cuda {

inline cudaStream_t getCurrentCUDAStream() { return nullptr; }

struct DeviceProperties {
  int major;  // 8: the newest without a grouped product of torch's
};

inline DeviceProperties device_properties{8};
inline const DeviceProperties* getCurrentDeviceProperties() { return &device_properties; }

}  // namespace at::cuda
