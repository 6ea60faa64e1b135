#!/usr/bin/env bash
# Tests the AMX kernels on an x86-64 processor without AMX: emulates their tile instructions.
#
#   scripts/test_amx.sh                      the tests of GEMMs, and of operators that use GEMMs
#   scripts/test_amx.sh tests/ops -k experts  what pytest finds with these arguments
#   scripts/test_amx.sh --time               the speed of experts in a model of the time of AMX
#
# The processor needs AVX512-BF16. PYTHON is an interpreter with torch and moe_ext (default
# .venv/bin/python). The library is in build/amx, or in build/amx_time for --time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
export PATH="$(dirname "$python"):$PATH"  # cmake and ninja may be next to PYTHON
build=build/amx header=emulated_amx.h
[ "${1:-}" != --time ] || build=build/amx_time header=timed_amx.h
cmake -S . -B $build -G Ninja -DCMAKE_PREFIX_PATH="$("$python" -m moe_ext.info --cmake-prefix)" \
  -DCMAKE_CXX_FLAGS="-include $PWD/tests/cpp/$header"
cmake --build $build --target moe_ext_kernels
# Loaded first, it takes the place of the library with the same name.
export LD_PRELOAD=$PWD/$build/lib/libmoe_ext_kernels.so
isa=$("$python" -c 'import moe_ext.info; print(moe_ext.info.isa())')
[ "$isa" = amx ] || { echo "$0: expected the instruction set amx, got $isa" && exit 1; }
[ "${1:-}" != --time ] || exec "$python" scripts/time_amx.py
[ $# -gt 0 ] || set -- tests/ops/test_products.py tests/ops/test_packed_experts.py \
  tests/ops/test_operators.py -k 'products or experts or linear_cross_entropy or lstm'
"$python" -m pytest -p no:cacheprovider "$@"
