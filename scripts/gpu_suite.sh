#!/usr/bin/env bash
# Builds for the installed GPU, then runs the tests and the benchmarks; or runs only one step.
#
#   scripts/gpu_suite.sh OUTPUT [build|test|sanitize|benchmark|all] [PYTHON]
#
# PYTHON (default python3) must have torch with CUDA and pytest. The script downloads nothing and
# continues if other packages are missing. On 16 cores the build takes about 5 minutes. test,
# sanitize and benchmark stop after at most 9, 4 and 9 minutes.
#
# The script writes device.txt, build.log, info.txt, tests.log and sanitizer.log to OUTPUT, and with
# CMake examples.log. For each dtype, the benchmark writes a log, a JSON file, tables in Markdown and
# a profile of our kernels. The JSON file is updated after every problem, so a stopped step keeps its
# results. At the end the script packs OUTPUT into OUTPUT.tar.gz. The exit status is nonzero if the
# build, the memory checks or the tests failed. OUTPUT also contains the built library and module: on
# another machine with the same hardware and software, `cp -r OUTPUT/lib moe_ext/`
# replaces the build.
set -uo pipefail

usage() { sed -n '4s/^#  *//p' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [ $# -le 3 ] || usage
step=${2:-all}
case $step in build | test | sanitize | benchmark | all) ;; *) usage ;; esac
mkdir -p "$1" || exit 2
output=$(cd "$1" && pwd)
python=$(command -v "${3:-python3}") || { echo "PYTHON: found no ${3:-python3}" >&2; exit 2; }
bin=$(cd "$(dirname "$python")" && pwd)
python=$bin/$(basename "$python")
cd "$(dirname "$0")/.."
export PATH="$bin:$PATH"  # ninja may be next to PYTHON
export PYTHONPATH="$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0  # no TF32
say() { printf '\n== %s\n' "$*"; }
has() { "$python" -c "import $1" 2> /dev/null; }
# Describes the exit status of a command that ran under `timeout`.
outcome() { case $1 in 124 | 137) echo "not finished in time" ;; *) echo "status $1" ;; esac; }

"$python" - << 'END' | tee "$output/device.txt" || exit 2
import torch
assert torch.cuda.is_available(), "torch sees no GPU"
device = torch.cuda.get_device_properties(0)
print(f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
END

build() {
  say "build"
  "$python" - << 'END' 2>&1 | tee "$output/build.log" || return 1
import os, sys, sysconfig
headers = sysconfig.get_path("include")
if not os.path.exists(f"{headers}/Python.h"):
    sys.exit(f"the build needs Python's headers: found no {headers}/Python.h")
END
  command -v ninja > /dev/null || echo "found no ninja: the files are compiled sequentially"
  local capability
  capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$capability}
  MOE_EXT_CUDA=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} "$python" setup.py build_ext --inplace \
    > "$output/build.log" 2>&1 ||
    { tail -n 40 "$output/build.log"; echo "the build failed: $output/build.log" >&2; return 1; }
  cp -r moe_ext/lib "$output/"
  "$python" -m moe_ext.info 2>&1 | tee "$output/info.txt" || true  # ignores a failed self-test
  if command -v cmake > /dev/null && command -v ninja > /dev/null; then
    # A C++ program finds torch's and CUDA's libraries by itself.
    cmake -S examples/cpp -B build/examples -G Ninja \
      -DCMAKE_PREFIX_PATH="$("$python" -m moe_ext.info --cmake-prefix)" > "$output/examples.log" &&
      cmake --build build/examples --target ops >> "$output/examples.log" &&
      env -u LD_LIBRARY_PATH build/examples/ops || echo "a C++ program failed: $output/examples.log"
  fi
}

# Runs in this order: the slow first use of the device, a test that might hang, all tests. At the
# time limit, SIGINT makes pytest report the failures so far.
tests() {
  say "tests"
  local options=()
  timeout 60 "$python" -c 'import moe_ext, torch; torch.ones(1, device="cuda").item()' ||
    { echo "first use of moe_ext and the device: $(outcome $?)"; return 1; }
  timeout 60 "$python" -m pytest -q -m cuda -k experts_without_rows -p no:cacheprovider \
    tests/ops/test_cuda.py || echo "torch's grouped GEMM, an expert without rows: $(outcome $?)"
  if has xdist; then
    options+=(-n 4)
    export OMP_NUM_THREADS=4 OMP_WAIT_POLICY=PASSIVE
  else
    echo "found no pytest-xdist: uses one process"
  fi
  if has pytest_timeout; then options+=(--timeout 90 --timeout-method thread); fi
  timeout -k 15 -s INT 420 "$python" -m pytest -v --tb=short -m cuda -p no:cacheprovider \
    --continue-on-collection-errors --durations=10 ${options[@]+"${options[@]}"} \
    tests/ops tests/layer tests/distributed lab/tests/test_layer_benchmark.py 2>&1 |
    tee "$output/tests.log" | grep -v ' PASSED '
}

sanitize() {
  say "memory checks"
  if ! command -v compute-sanitizer > /dev/null; then
    echo "skipped: found no compute-sanitizer" | tee "$output/sanitizer.log"
    return 0
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 15 -s INT 240 compute-sanitizer --error-exitcode 99 \
    --report-api-errors no "$python" -m pytest -v -x -m cuda -p no:cacheprovider \
    -k "test_values and float64" tests/ops/test_operators.py > "$output/sanitizer.log" 2>&1
  local status=$? passed
  passed=$(grep -c ' PASSED' "$output/sanitizer.log")
  tail -n 3 "$output/sanitizer.log"
  case $status in
    0) ;;
    99) echo "compute-sanitizer found errors"; return 1 ;;
    124 | 137) echo "$(outcome "$status"): $passed tests passed until then" ;;
    *) echo "the tests under compute-sanitizer: $(outcome "$status")"; return 1 ;;
  esac
}

benchmark() {
  local each dtype minutes
  for each in "bfloat16 5" "float32 2"; do
    read -r dtype minutes <<< "$each"
    say "benchmark, $dtype"
    rm -f "$output/$dtype".{json,md,kernels.txt}
    timeout -k 15 -s INT $((60 * minutes + 45)) "$python" -m moe_lab benchmark layer \
      --device cuda --dtype "$dtype" --seconds 1.5 --minutes "$minutes" \
      --peers "sort + split" "sort + grouped_mm" ScatterMoE "ScatterMoE GLU" \
      "HF eager" "HF grouped_mm" "HF batched_mm" --profile "$output/$dtype.kernels.txt" \
      --json "$output/$dtype.json" > "$output/$dtype.log" 2>&1 || tail -n 5 "$output/$dtype.log"
    [ -e "$output/$dtype.json" ] || continue
    "$python" -m moe_lab benchmark layer --report "$output/$dtype.json" | tee "$output/$dtype.md"
  done
}

status=0
trap 'tar -czf "$output.tar.gz" -C "$(dirname "$output")" "$(basename "$output")"' EXIT
case $step in build | all) build || exit 1 ;; esac
case $step in test | all) tests || status=1 ;; esac
case $step in sanitize | all) sanitize || status=1 ;; esac
case $step in benchmark | all) benchmark ;; esac
exit "$status"
