// Registers the operators of CUDA whose host functions are the same on every device.
#include "../register_operators.h"

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) { moe_ext::register_operators<moe_ext::Cuda>(m); }
