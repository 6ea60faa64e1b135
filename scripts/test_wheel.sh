#!/usr/bin/env bash
# Tests an installed moe_ext, outside its source tree: self-test, training steps, a C++ program.
#
#   scripts/test_wheel.sh PYTHON [--all]
#
# PYTHON is the interpreter of an environment with moe_ext and torch. The test needs CMake and ninja.
# With --all, it also runs torch.compile, torch.export and the tests of the operators, which need
# Python's headers and the packages of the group `test`.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
python=$(realpath -s "$1")
PATH=$(dirname "$python"):$PATH
unset PYTHONPATH LD_LIBRARY_PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"  # nothing below may import the source tree

cpp_program() {
  if [ "$("$python" -c 'import platform; print(platform.machine())')" != "$(uname -m)" ]; then
    echo "C++: skipped, $python runs in an emulator"
    return
  fi
  library=$("$python" -c 'import torch; from moe_ext import _build; print(_build.libraries()[_build.release(torch.__version__)])')
  # The library finds torch's by its RUNPATH.
  if ldd "$library" | grep 'not found'; then exit 1; fi
  cmake -S "$source/examples/cpp" -B cpp -G Ninja -DCMAKE_PREFIX_PATH="$("$python" -m moe_ext.info --cmake-prefix)"
  cmake --build cpp --target ops
  cpp/ops
}
cpp_program > cpp.log 2>&1 &  # compiles on one core, while the other one runs Python
cpp=$!

"$python" -m moe_ext.info
"$(dirname "$python")/moe-ext" --help > help.txt
"$python" - << 'END'
import torch
from moe_ext import MoE

torch.manual_seed(0)
layer = MoE(d_model=64, num_experts=8, k=2, hidden_sizes=[128])
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
x = torch.randn(256, 64)
losses = []
for _ in range(50):
    optimizer.zero_grad()
    y, aux = layer(x)
    loss = (y - x).square().mean() + aux.loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"50 training steps: loss {losses[0]:.3f} to {losses[-1]:.3f}")
assert losses[-1] < losses[0]
END

if [ "${2:-}" = --all ]; then
  "$python" - << 'END'
import torch
from moe_ext import MoE

torch.manual_seed(0)
layer = MoE(d_model=64, num_experts=8, k=2, hidden_sizes=[128]).eval()
x = torch.randn(256, 64)
expected, _ = layer(x)
compiled, _ = torch.compile(layer, fullgraph=True)(x)
exported, _ = torch.export.export(layer, (x,)).module()(x)
for name, y in (("compiled", compiled), ("exported", exported)):
    error = (y - expected).abs().max().item()
    print(f"{name}: largest difference {error:.1e}")
    assert error < 1e-6
END
  cp -r "$source/conftest.py" "$source/pyproject.toml" "$source/tests" .
  "$python" -m pytest -q -p no:cacheprovider tests/ops -m "not emulator" \
    --ignore tests/ops/test_emulation.py --ignore tests/ops/test_cuda.py  # they compile csrc/cuda
fi

wait "$cpp" || { cat cpp.log; exit 1; }
cat cpp.log
