#!/usr/bin/env bash
# Builds libmoe_ext.so and its C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer, and
# runs the tests. Takes about 15 minutes on 2 cores. Passes its arguments to ctest.
#
# PYTHON is an interpreter with torch and moe_ext (default .venv/bin/python). The tests need Debian's
# cmake, ninja-build and libgtest-dev.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
build=build/sanitize

cmake -S . -B $build -G Ninja -DMOE_EXT_TESTS=ON -DMOE_EXT_SANITIZE=address,undefined \
  -DMOE_EXT_PYTHON="$python" \
  -DCMAKE_PREFIX_PATH="$("$python" -c 'import torch; print(torch.utils.cmake_prefix_path)')"
cmake --build $build

# torch's own libraries are not compiled with sanitizers: containers that cross into them would look
# overflown, and what they never free would look leaked.
export ASAN_OPTIONS=detect_container_overflow=0:detect_leaks=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}
export UBSAN_OPTIONS=print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}
exec ctest --test-dir $build --output-on-failure "$@"
