#include <torch/library.h>

#include "../operators.h"

TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) { moe_ext::implement_operators<moe_ext::Cuda>(m); }
