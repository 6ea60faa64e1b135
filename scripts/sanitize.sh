#!/usr/bin/env bash
# Builds libmoe_ext.so with sanitizers, and runs tests with it.
#
#   scripts/sanitize.sh address [PYTEST ARGUMENTS]   # AddressSanitizer, UndefinedBehaviorSanitizer
#   scripts/sanitize.sh thread [PYTEST ARGUMENTS]    # ThreadSanitizer
#
# Without further arguments, `address` runs the C++ tests. Then both run the Python tests of the
# operators and the layer, without those of emulated CUDA kernels, which have no sanitizers.
#
# PYTHON is an interpreter with torch and moe_ext (default .venv/bin/python). The script needs
# Debian's cmake and ninja-build. `address` needs libgtest-dev too, `thread` clang-16 and
# libomp-16-dev.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
kind=${1:-}
build=build/$kind
common=allocator_may_return_null=1  # tests ask for too much memory

# Builds with the given options of cmake.
build() {
  cmake -S . -B "$build" -G Ninja -DMOE_EXT_PYTHON="$python" "$@" \
    -DCMAKE_PREFIX_PATH="$("$python" -c 'import torch; print(torch.utils.cmake_prefix_path)')"
  cmake --build "$build"
}

# Runs pytest with the library of the build. $1 are the libraries that must be loaded first.
test_python() {
  local first=$1
  shift
  [ $# -gt 0 ] || set -- tests/ops tests/layer
  LD_PRELOAD=$first MOE_EXT_LIBRARY=$(echo "$build"/lib/*/libmoe_ext.so) setarch --addr-no-randomize "$python" -m pytest -q \
    -p no:cacheprovider -m "not emulator" --ignore tests/ops/test_emulation.py "$@"
}

case $kind in
  address)
    build -DMOE_EXT_SANITIZE=address,undefined -DMOE_EXT_TESTS=ON
    # torch's own libraries are not compiled with sanitizers: containers that cross into them would
    # look overflown, and what they never free would look leaked.
    options=$common:detect_container_overflow=0:detect_leaks=0
    export ASAN_OPTIONS=$options${ASAN_OPTIONS:+:$ASAN_OPTIONS}
    export UBSAN_OPTIONS=print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}
    [ $# -gt 1 ] || ctest --test-dir "$build" --output-on-failure
    test_python "$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" "${@:2}"
    ;;
  thread)
    # ThreadSanitizer does not see how threads wait for each other in gcc's OpenMP. clang's OpenMP
    # tells it through libarcher. Loaded first, clang's also runs torch's parallel loops.
    build -DMOE_EXT_SANITIZE=thread -DCMAKE_CXX_COMPILER=clang++-16 -DCMAKE_CXX_FLAGS=-shared-libsan
    lib=$(dirname "$(realpath "$(command -v clang++-16)")")/../lib
    export OMP_TOOL_LIBRARIES=$lib/libarcher.so
    export TSAN_OPTIONS=$common:ignore_noninstrumented_modules=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}
    runtime=$(clang++-16 -print-file-name=libclang_rt.tsan-x86_64.so)
    test_python "$runtime $lib/libomp.so" "${@:2}"
    ;;
  *)
    echo "sanitize.sh: the first argument must be address or thread, got '$kind'" >&2
    exit 2
    ;;
esac
