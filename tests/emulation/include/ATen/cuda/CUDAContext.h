#pragma once

#include "emulation.h"

namespace at::cuda {

inline cudaStream_t getCurrentCUDAStream() { return nullptr; }

struct DeviceProperties {
  int major;  // compute capability; 8 does not use torch's grouped GEMM
};

inline DeviceProperties device_properties{8};
inline const DeviceProperties* getCurrentDeviceProperties() { return &device_properties; }

}  // namespace at::cuda
