#!/usr/bin/env bash
# Builds moe_ext for 64-bit Arm with a cross compiler, and tests it on x86-64 with QEMU's user mode.
#
#   scripts/test_aarch64.sh            digests, and a subset of the tests of operators and layers
#   scripts/test_aarch64.sh --whole    digests, and all of these tests
#   scripts/test_aarch64.sh --build    only builds
#   scripts/test_aarch64.sh --wheel    builds and tests the wheel with scripts/build_wheels.sh
#
# The digests compare the results of every operator with those of x86-64, bit by bit. Further
# arguments go to pytest, or to build_wheels.sh. PYTHON is an interpreter of this machine with torch
# and moe_ext (default .venv/bin/python). CXX is the cross compiler (default aarch64-linux-gnu-g++).
# MAX_JOBS works as in setup.py.
#
# Everything is in build/aarch64: Debian's Python for Arm, which needs Debian's apt-get, and torch's
# wheel for Arm, with NVIDIA's libraries replaced by stubs. As root, installs missing tools.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s (after %d s)\n' "$*" "$SECONDS"; }
mode=--subset
case ${1:-} in --whole | --build | --wheel) mode=$1 && shift ;; esac
host=$(realpath -s "${PYTHON:-.venv/bin/python}")
home=$PWD/build/aarch64 root=$PWD/build/aarch64/root site=$PWD/build/aarch64/site
export CXX=${CXX:-aarch64-linux-gnu-g++} MOE_EXT_CUDA=0
export PATH="$(dirname "$host"):$PATH"  # ninja may be next to PYTHON
unset PYTHONPATH LD_LIBRARY_PATH
mkdir -p "$home"

missing=()
command -v aarch64-linux-gnu-g++ > /dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64 > /dev/null || missing+=(qemu-user)
command -v ninja > /dev/null || missing+=(ninja-build)
[ $mode != --wheel ] || command -v patchelf > /dev/null || missing+=(patchelf)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"
fi

if [ ! -e "$root/complete" ]; then
  say "Debian's Python for Arm"
  rm -rf "$home/apt" "$root"
  mkdir -p "$home"/apt/{state/lists/partial,cache/archives/partial} "$root"
  touch "$home/apt/status"
  # A package database of its own: this system does not change.
  cat > "$home/apt/apt.conf" << END
APT::Architecture "arm64";
APT::Architectures "arm64";
APT::Install-Recommends "false";
Dir::State "$home/apt/state";
Dir::State::status "$home/apt/status";
Dir::Cache "$home/apt/cache";
Debug::NoLocking "true";
END
  export APT_CONFIG=$home/apt/apt.conf
  apt-get update
  apt-get install --download-only -y python3 libpython3-dev libgomp1 libstdc++6
  unset APT_CONFIG
  for package in "$home"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  # torch reads the features of the processor, and QEMU would show those of this machine.
  mkdir -p "$root/proc"
  for processor in $(seq 0 $(($(nproc) - 1))); do
    printf '%s\t: %s\n' processor "$processor" BogoMIPS 100.00 \
      Features 'fp asimd aes crc32 atomics fphp asimdhp asimdrdm asimddp i8mm bf16' \
      'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c \
      'CPU revision' 1
    echo
  done > "$root/proc/cpuinfo"
  touch "$root/complete"
fi
version=$(basename "$root"/usr/lib/python3.*)
python=$home/python

if [ ! -e "$site/complete" ]; then
  say "torch for Arm"
  rm -rf "$site"
  install=("$host" -m pip install --quiet --target "$site" --only-binary :all: --upgrade
    --python-version "${version#python}" --implementation cp)
  for glibc in 17 26 27 28 34; do install+=(--platform "manylinux_2_${glibc}_aarch64"); done
  torch=$("$host" -c 'import torch; print(torch.__version__.split("+")[0])')
  "${install[@]}" --no-deps "torch==$torch" nvidia-cuda-runtime
  "${install[@]}" auditwheel filelock fsspec jinja2 networkx numpy pip pytest pytest-timeout \
    'setuptools>=77' sympy 'typing-extensions>=4.13' wheel
  echo "$site" > "$root/usr/lib/python3/dist-packages/site.pth"

  # libtorch_cuda.so and what it needs have several gigabytes. A stub has all symbols that the other
  # libraries miss. A function of the stub prints its name and stops the program, except those that
  # run on a machine without a GPU.
  cat > "$home/stub.cpp" << 'END'
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace c10d {
void** get_gil_checker() {
  static void* checker = nullptr;
  return &checker;
}
}  // namespace c10d

namespace torch::cuda::nccl {
uint64_t version() { return 0; }
const char* version_suffix() { return ""; }
}  // namespace torch::cuda::nccl

// c10d::ProcessGroupNCCL::Options::Options(bool), for a default argument
extern "C" void options(void* self, bool) asm("_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb");
extern "C" void options(void* self, bool) { new (self) c10d::Backend::Options("nccl"); }
END
  compile=(aarch64-linux-gnu-g++ -std=c++20 -O1 -w -fPIC -I "$site/torch/include")
  "${compile[@]}" -c "$home/stub.cpp" -o "$home/stub.o"
  cd "$site/torch/lib"
  rm -f libtorch_cuda.so libtorch_cuda_linalg.so libtorch_nvshmem.so libcaffe2_nvrtc.so
  names() { awk "${1:-} { print \$NF }" | LC_ALL=C sort -u; }
  libraries=(*.so* "$site"/nvidia/*/lib/*.so* "$root"/{lib,usr/lib}/aarch64-linux-gnu/*.so*
    "$root/lib/ld-linux-aarch64.so.1" "$root/usr/bin/$version")
  { aarch64-linux-gnu-nm -D --defined-only "${libraries[@]}" 2> /dev/null || true
    aarch64-linux-gnu-nm --defined-only "$home/stub.o"; } | names | sed 's/@.*//' > "$home/defined"
  aarch64-linux-gnu-nm -D --undefined-only libtorch*.so libc10*.so libshm.so |
    names '$1 == "U"' > "$home/undefined"
  # Functions write(2, name, size) and trap. A type (_ZTI) gets no bases, a virtual table (_ZTV)
  # no functions.
  awk -F@ -v map="$home/stub.map" '
    NR == FNR { defined[$1]; next }
    $1 in defined { next }
    NF > 1 { versions[$2] = versions[$2] $1 ";" }
    { print (/^_ZT/ ? ".data" : ".text") "\n.balign 8\n.globl " $1 "\n" $1 ":" }
    /^_ZTI/ { print ".xword _ZTVN10__cxxabiv117__class_type_infoE + 16, 1f\n1: .asciz \"" substr($1, 5) "\""; next }
    /^_ZTV/ { print ".zero 1024"; next }
    { print "adr x1, 1f; mov x2, #" length($1) + 1 "; mov x0, #2; mov x8, #64; svc #0; brk #0" }
    { print "1: .ascii \"" $1 "\\n\"" }
    END { for (name in versions) print name " { global: " versions[name] " };" > map }
  ' "$home/defined" "$home/undefined" > "$home/stub.s"
  "${compile[@]}" -shared -Wl,-soname,libtorch_cuda.so,--version-script="$home/stub.map" \
    "$home/stub.o" "$home/stub.s" -o libtorch_cuda.so
  for name in libcudnn.so.9 libcufile.so.0 libcupti.so.13; do ln -sf libtorch_cuda.so "$name"; done
  cd - > /dev/null
  # torch looks for the CUDA kernels of its own operators. Every environment has the standard library.
  cat > "$root/usr/lib/$version/without_cuda.py" << 'END'
def order(operator, dispatch_key, graph):
    return [] if dispatch_key == "CUDA" else graph
END
  touch "$site/complete"
fi

# The headers of Python alone: the cross compiler has those of the C library.
mkdir -p "$home/include"
ln -sfn "$root/usr/include/$version" "$home/include/$version"
ln -sfn "$root/usr/include/aarch64-linux-gnu" "$home/include/aarch64-linux-gnu"

# Emulates pointer authentication cheaply. Without SVE, because few processors have it. QEMU ignores
# the memory limit that a test sets for its process, so each process gets a limit from outside.
cat > "$python" << END
#!/bin/sh
ulimit -v 4194304  # KiB
export PYTHONHOME=$root/usr TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN=without_cuda.order
export CPLUS_INCLUDE_PATH=$home/include/$version:$home/include
export TORCHINDUCTOR_CPP_MARCH=armv8.6-a+bf16  # The cross compiler does not know -march=native.
exec qemu-aarch64 -cpu max,pauth-impdef=on,sve=off -0 "\$0" -L $root $root/usr/bin/$version "\$@"
END
chmod +x "$python"

if [ $mode = --wheel ]; then
  PYTHON=$python exec bash scripts/build_wheels.sh "$@"
fi

say "building with $($CXX --version | head -1)"
source=$home/source
mkdir -p "$source"
find "$source" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files --cached --others --exclude-standard -z |
  xargs -0 sh -c 'for file; do [ ! -e "$file" ] || printf "%s\0" "$file"; done' sh |
  xargs -0 cp --parents --preserve=timestamps -t "$source"
cd "$source"
"$python" setup.py --quiet build_ext --inplace
"$python" -m moe_ext.info
[ $mode != --build ] || exit 0

say "comparing bits with x86-64"
cd - > /dev/null
export OMP_WAIT_POLICY=PASSIVE
# AVX2 converts bfloat16 numbers to float32, as NEON does, on every x86-64 processor.
MOE_EXT_ISA=avx2 PYTHONPATH=$PWD "$host" tests/operators.py --save "$home/arguments.pt" > "$home/x86-64"
cd "$source"
for isa in neon neon_bf16; do
  MOE_EXT_ISA=$isa PYTHONPATH=$PWD "$python" tests/operators.py --load "$home/arguments.pt" > "$home/$isa"
  echo "$isa: $(comm -12 <(sort "$home/x86-64") <(sort "$home/$isa") | wc -l) of $(wc -l < "$home/$isa") identical"
  diff <(grep -E ' float(32|64) ' "$home/x86-64") <(grep -E ' float(32|64) ' "$home/$isa")
done

say "tests"
# Not under emulation: kernels of CUDA, and the memory of a process, which is QEMU's.
tests=(-q -p no:cacheprovider -m "not emulator" --timeout 3600
  --ignore tests/ops/test_cuda.py --ignore tests/ops/test_emulation.py
  --deselect tests/ops/test_experts.py::test_peak_memory_with_transposed_weights)
tests+=(tests/layer tests/ops)
if [ $mode != --whole ]; then
  # Without torch.compile, and without the tests that take longest.
  slow=(compile export opcheck instruction_set limits "(test_values and not float64)" deterministic
    hostile any_number_of_rows large_gradients several_blocks rows_do_not_depend_on_each_other
    a_token_does_not_depend_on_the_others replaces_the_function_of_torch)
  tests+=(-k "not (${slow[0]}$(printf ' or %s' "${slow[@]:1}"))")
fi
PYTHONPATH=$PWD "$python" -m pytest "${tests[@]}" "$@"  # also for child processes
