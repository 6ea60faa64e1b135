// MOE_EXT_KERNEL_API marks what libmoe_ext_kernels.so exports; everything else in it is hidden.
#pragma once

#define MOE_EXT_KERNEL_API __attribute__((visibility("default")))
