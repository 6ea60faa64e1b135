// What the kernels of CUDA use on this machine.
#include "../kernels/machine.h"
#include "launch.cuh"

#define MOE_EXT_TEXT_OF(number) #number
#define MOE_EXT_TEXT(number) MOE_EXT_TEXT_OF(number)

namespace moe_ext::cuda {

const char* toolkit_version() {
  return MOE_EXT_TEXT(__CUDACC_VER_MAJOR__) "." MOE_EXT_TEXT(__CUDACC_VER_MINOR__);
}

int compute_capability() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major;
}

}  // namespace moe_ext::cuda
