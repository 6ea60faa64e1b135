#include "operators.h"

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { moe_ext::implement_operators<moe_ext::Cpu>(m); }
TORCH_LIBRARY_IMPL(moe_ext, Meta, m) { moe_ext::implement_operators<moe_ext::Meta>(m); }
