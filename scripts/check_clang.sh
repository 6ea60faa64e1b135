#!/usr/bin/env bash
# Checks csrc/**/*.cpp with clang 16 or later and generates no code.
# Warnings are errors. Prints a message and succeeds if no such clang is installed.
#
# With Debian's g++-aarch64-linux-gnu, also checks csrc/cpu for 64-bit Arm, and compiles the NEON
# micro-kernels with both compilers. scripts/test_aarch64.sh runs them.
#
# PYTHON is an interpreter with torch (default .venv/bin/python). CLANG is the compiler (default:
# the first clang++ of version 16 or later in PATH).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

clang=${CLANG:-}
for name in clang++ clang++-{16..30}; do
  [ -z "$clang" ] || break
  major=$("$name" -dumpversion 2> /dev/null | cut -d. -f1) || continue
  if [ "${major:-0}" -ge 16 ]; then clang=$name; fi
done
if [ -z "$clang" ]; then
  echo "clang: skipped, found no clang 16 or later (Debian: apt-get install clang-16)"
  exit 0
fi

# -isystem suppresses warnings in torch's headers.
read -ra includes < <("$python" -c '
import sysconfig
from torch.utils.cpp_extension import include_paths
print(*(f"-isystem {path}" for path in [*include_paths(), sysconfig.get_path("include")]))')
mapfile -t flags < csrc/cxx_flags.txt
flags+=(-std=c++20 -Werror -I moe_ext/include)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Checks the files of standard input, separated by zero bytes. Arguments are options of clang. The
# headers that most files include are compiled once.
check() {
  printf '#include <%s>\n' ATen/Dispatch.h torch/csrc/autograd/custom_function.h torch/library.h |
    "$clang" "$@" "${flags[@]}" "${includes[@]}" -x c++-header - -o "$work/torch.pch"
  xargs -0 -n 1 -P "$(nproc)" \
    "$clang" "$@" -fsyntax-only -include-pch "$work/torch.pch" "${flags[@]}" "${includes[@]}"
}

echo "clang: csrc/**/*.cpp with $("$clang" --version | head -1)"
find csrc -name '*.cpp' -print0 | check

if ! command -v aarch64-linux-gnu-g++ > /dev/null; then
  echo "clang: skipped 64-bit Arm, found no cross compiler (Debian: apt-get install g++-aarch64-linux-gnu)"
  exit 0
fi
echo "clang: csrc/cpu/**/*.cpp for 64-bit Arm"
find csrc/cpu -name '*.cpp' -print0 | check --target=aarch64-linux-gnu
echo "NEON micro-kernels with clang and $(aarch64-linux-gnu-g++ --version | head -1)"
for compiler in "$clang --target=aarch64-linux-gnu" aarch64-linux-gnu-g++; do
  printf '%s\0' csrc/cpu/gemm/micro_kernels_neon*.cpp |
    xargs -0 -n 1 -P "$(nproc)" $compiler -c "${flags[@]}" "${includes[@]}" -o /dev/null
done
