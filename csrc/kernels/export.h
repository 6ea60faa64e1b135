// MOE_EXT_KERNEL_API marks what the libraries of kernels export; every other name is hidden.
#pragma once

#define MOE_EXT_KERNEL_API __attribute__((visibility("default")))
