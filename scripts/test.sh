#!/usr/bin/env bash
# Installs missing packages, then checks the style, builds the documentation and runs the tests.
# Passes its arguments to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

say "style, types and prose"
find csrc moe_ext/_C.cpp moe_ext/include tests/cpp tests/emulation examples/cpp -type f \
  ! -name '*.txt' ! -name '*.py' -exec "$venv/bin/clang-format" --dry-run -Werror {} +
PYTHON=$python bash scripts/check_clang.sh
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -m mypy --strict --untyped-calls-exclude torch --follow-imports silent examples
"$venv/bin/codespell"
"$python" docs/check_prose.py

bash scripts/docs.sh

say "C++ tests"
if command -v cmake > /dev/null && command -v ninja > /dev/null && [ -e /usr/include/gtest/gtest.h ]; then
  prefix=$("$python" -m moe_ext.info --cmake-prefix)
  cmake -S tests/cpp -B build/cpp -G Ninja -DCMAKE_PREFIX_PATH="$prefix" \
    -DMOE_EXT_PYTHON="$(command -v "$python" | xargs realpath -s)"
  cmake --build build/cpp
  cmake -S examples/cpp -B build/examples -G Ninja -DCMAKE_PREFIX_PATH="$prefix"  # for pytest
  cmake --build build/examples
  ctest --test-dir build/cpp --output-on-failure
else
  echo "skipped: found no CMake, ninja or GoogleTest (Debian: apt-get install cmake ninja-build libgtest-dev)"
fi

say "building the emulation of the CUDA kernels"
"$python" tests/emulated.py

say "Python tests"
# A waiting OpenMP thread leaves its core to the other test workers. Tests of several ranks often
# wait, so there are more workers than cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
exec "$python" -m pytest -q -n $workers --dist worksteal "$@"
