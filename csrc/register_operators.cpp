#include "register_operators.h"

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { moe_ext::register_operators<moe_ext::Cpu>(m); }
TORCH_LIBRARY_IMPL(moe_ext, Meta, m) { moe_ext::register_operators<moe_ext::Meta>(m); }
