#!/usr/bin/env bash
# Builds for the installed GPU, then runs the tests and the benchmarks; or runs only one step.
#
#   scripts/gpu_suite.sh OUTPUT [STEP] [PYTHON]
#
# The steps, with the time that they take at most:
#
#     first   9.5 minutes  build, self-test, probes, the tests of the operators
#     second  7 minutes    memcheck, racecheck and synccheck on five tests, GEMM rates, a profile
#     third   7 minutes    the layer benchmark in bfloat16 against other implementations
#     all                  first with all tests, second, third, the benchmark in float32; the default
#
# Their parts are steps too: build (7 minutes), probe (2), test (7, or TEST_SECONDS), sanitize
# (4.5), rates (1.5), profile (2) and benchmark (11). If the time on a machine is limited, run the
# steps in several calls: `first`, then `test` with TEST_SECONDS=180; `build`, then `second`;
# `build`, then `third`. On 16 cores the build takes about 5 minutes. A build that was stopped
# continues where it was. `second` and `third` need no build where
# `cp -r OUTPUT/lib moe_ext/` brings an earlier build of the same hardware and software.
#
# PYTHON (default python3) must have torch with CUDA and pytest. The script downloads nothing and
# continues if other packages are missing; tools.txt says which.
#
# The script writes device.txt, tools.txt, build.log, info.txt, probes.log, tests.log, rates.md,
# sanitizer logs and profiles to OUTPUT, and with CMake examples.log. For each dtype, the benchmark
# writes a log, a JSON file, tables in Markdown and a profile of our kernels. The JSON file is
# updated after every problem, so a stopped step keeps its results. At the end the script packs
# OUTPUT into OUTPUT.tar.gz. The exit status is nonzero if the build, a probe, the memory checks or
# the tests failed. OUTPUT also contains the built libraries.
set -uo pipefail

usage() { sed -n '4s/^#  *//p' "$0" >&2; exit 2; }
if [ $# -lt 1 ] || [ $# -gt 3 ]; then usage; fi
step=${2:-all}
case $step in
  first | second | third | all) ;;
  build | probe | test | sanitize | rates | profile | benchmark) ;;
  *) usage ;;
esac
mkdir -p "$1" || exit 2
output=$(cd "$1" && pwd)
python=$(command -v "${3:-python3}") || { echo "PYTHON: found no ${3:-python3}" >&2; exit 2; }
bin=$(cd "$(dirname "$python")" && pwd)
python=$bin/$(basename "$python")
cd "$(dirname "$0")/.." || exit 2
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

# Says what this machine lacks, and what is not done without it.
tools() {
  local each module name
  "$python" - << 'END' || echo "no setuptools 77: no build (PYTHONPATH may name a folder with it)"
import setuptools
assert int(setuptools.__version__.split(".")[0]) >= 77
END
  "$python" - << 'END' || echo "no Python.h: no build (Debian: apt-get install python3-dev)"
import os, sysconfig
assert os.path.exists(sysconfig.get_path("include") + "/Python.h")
END
  for each in "nvcc: no build, unless CUDA_HOME has one" "ninja: a slow build, file after file" \
    "cmake: no C++ example" "compute-sanitizer: no memory checks" "ncu: a profile by torch alone"; do
    name=${each%%:*}
    command -v "$name" > /dev/null || echo "no $each"
  done
  for each in "pytest: no tests" "xdist: tests in one process" \
    "pytest_timeout: a hanging test ends the tests"; do
    module=${each%%:*}
    has "$module" || echo "no $each"
  done
  return 0
}

build() {
  say "build"
  local capability
  capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$capability}
  MOE_EXT_CUDA=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} timeout -k 5 375 \
    "$python" setup.py build_ext --inplace > "$output/build.log" 2>&1
  local result=$?
  if [ $result != 0 ]; then
    tail -n 40 "$output/build.log"
    echo "the build: $(outcome $result): $output/build.log" >&2
    return 1
  fi
  cp -r moe_ext/lib "$output/"
  timeout -k 5 45 "$python" -m moe_ext.info 2>&1 | tee "$output/info.txt"
  result=${PIPESTATUS[0]}
  [ "$result" = 0 ] || { echo "the self-test: $(outcome "$result")"; status=1; }
  if [ "$step" != first ] && command -v cmake > /dev/null && command -v ninja > /dev/null; then
    # A C++ program finds torch's and CUDA's libraries by itself.
    cmake -S examples/cpp -B build/examples -G Ninja \
      -DCMAKE_PREFIX_PATH="$("$python" -m moe_ext.info --cmake-prefix)" > "$output/examples.log" &&
      cmake --build build/examples --target ops >> "$output/examples.log" &&
      env -u LD_LIBRARY_PATH build/examples/ops || echo "a C++ program failed: $output/examples.log"
  fi
}

# The slow first use of the device, then torch's grouped GEMM of experts without rows, which might
# hang: the log then names the case, and the tests that hang have a known reason.
probe() {
  say "probes"
  timeout -k 5 60 "$python" scripts/gpu_probes.py device 2>&1 | tee "$output/probes.log"
  local result=${PIPESTATUS[0]}
  [ "$result" = 0 ] || { echo "first use of the device: $(outcome "$result")"; return 1; }
  timeout -k 5 30 "$python" scripts/gpu_probes.py grouped-mm 2>&1 | tee -a "$output/probes.log"
  result=${PIPESTATUS[0]}
  [ "$result" = 0 ] || { echo "torch's grouped GEMM: $(outcome "$result")"; return 1; }
}

# Runs tests for some seconds. At the time limit, SIGINT makes pytest report the failures so far.
tests() {
  say "tests"
  local limit=$1 options=()
  shift
  if has xdist; then
    options+=(-n 4)
    export OMP_NUM_THREADS=4 OMP_WAIT_POLICY=PASSIVE
  fi
  if has pytest_timeout; then options+=(--timeout 90 --timeout-method thread); fi
  timeout -k 15 -s INT "$limit" "$python" -m pytest -v --tb=short -m cuda -p no:cacheprovider \
    --continue-on-collection-errors --durations=10 ${options[@]+"${options[@]}"} "$@" 2>&1 |
    tee "$output/tests.log" | grep -v ' PASSED '
  local result=${PIPESTATUS[0]}
  [ "$result" = 0 ] || { echo "the tests: $(outcome "$result")"; return 1; }
}

# Runs each tool of compute-sanitizer on tests of the kernels that use shared memory.
sanitize() {
  local tool options result passed failed=0
  local chosen=(
    "test_cuda.py::test_experts_of_any_size_in_any_type[cuda-72-200-False-dtype1]"  # float16
    "test_cuda.py::test_experts_of_any_size_in_any_type[cuda-70-201-False-dtype2]"  # float32
    "test_cuda.py::test_gating_and_plan_have_the_bits_of_the_cpu[cuda-256-8]"
    "test_operators.py::test_values[cuda-batchwise_topm-G=2-N=100-E=40-m=31-float64]"
    "test_operators.py::test_values[cuda-linear_cross_entropy-T=20-D=9-V=40-reduction=sum-recompute=True-float64]"
  )
  for tool in memcheck racecheck synccheck; do
    say "$tool"
    if ! command -v compute-sanitizer > /dev/null; then
      echo "skipped: found no compute-sanitizer" | tee "$output/$tool.log"
      continue
    fi
    options=(--tool "$tool" --error-exitcode 99)
    [ $tool != memcheck ] || options+=(--report-api-errors no)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 -s INT 75 compute-sanitizer "${options[@]}" \
      "$python" -m pytest -v -p no:cacheprovider "${chosen[@]/#/tests/ops/}" \
      > "$output/$tool.log" 2>&1
    result=$?
    passed=$(grep -c ' PASSED' "$output/$tool.log")
    tail -n 3 "$output/$tool.log"
    case $result in
      0) ;;
      99) echo "$tool found errors"; failed=1 ;;
      124 | 137) echo "$(outcome "$result"): $passed tests passed until then" ;;
      *) echo "the tests under $tool: $(outcome "$result")"; failed=1 ;;
    esac
  done
  return $failed
}

# TFLOP/s of the GEMMs.
rates() {
  say "GEMM rates, TFLOP/s"
  timeout -k 5 80 "$python" scripts/gpu_probes.py gemm-rates | tee "$output/rates.md"
  local result=${PIPESTATUS[0]}
  [ "$result" = 0 ] || { echo "GEMM rates: $(outcome "$result")"; return 1; }
}

# The time of each kernel in a layer of 128 experts; with ncu, the metrics of our kernels.
profile() {
  say "profile"
  rm -f "$output/profile.txt"
  timeout -k 5 70 "$python" -m moe_lab benchmark layer --device cuda --dtype bfloat16 \
    --shapes e128 --activations swiglu --seconds 1.5 --peers --profile "$output/profile.txt" \
    > "$output/profile.log" 2>&1 || tail -n 5 "$output/profile.log"
  [ ! -e "$output/profile.txt" ] || head -n 20 "$output/profile.txt"
  if ! command -v ncu > /dev/null; then
    echo "skipped the metrics of kernels: found no ncu"
    return 0
  fi
  timeout -k 5 45 ncu --kernel-name regex:tensor_core --launch-count 3 --set basic \
    "$python" scripts/gpu_probes.py gemm-rates --rows 2048 > "$output/ncu.txt" 2>&1 ||
    { echo "ncu failed (it may need more rights):"; tail -n 5 "$output/ncu.txt"; }
}

# Compares with other implementations: benchmark DTYPE MINUTES.
benchmark() {
  local dtype=$1 minutes=$2
  say "benchmark, $dtype"
  rm -f "$output/$dtype".{json,md,kernels.txt}
  timeout -k 15 -s INT $((60 * minutes + 45)) "$python" -m moe_lab benchmark layer \
    --device cuda --dtype "$dtype" --seconds 1.5 --minutes "$minutes" \
    --peers "sort + split" "sort + grouped_mm" ScatterMoE "ScatterMoE GLU" \
    "HF eager" "HF grouped_mm" "HF batched_mm" --profile "$output/$dtype.kernels.txt" \
    --json "$output/$dtype.json" > "$output/$dtype.log" 2>&1 || tail -n 5 "$output/$dtype.log"
  [ -e "$output/$dtype.json" ] || return 0
  "$python" -m moe_lab benchmark layer --report "$output/$dtype.json" | tee "$output/$dtype.md"
}

# Stops if moe_ext has no kernels of CUDA.
require_build() {
  "$python" -c 'import sys, moe_ext.info; sys.exit(moe_ext.info.cuda_version() is None)' && return
  echo "found no moe_ext with CUDA: run the step build, or cp -r OUTPUT/lib moe_ext/" >&2
  exit 2
}

# The limits of the tests in seconds leave time for the steps before them.
all_tests=(tests/ops tests/layer tests/distributed lab/tests/test_layer_benchmark.py)
status=0
trap 'tar -czf "$output.tar.gz" -C "$(dirname "$output")" "$(basename "$output")"' EXIT
tools 2> /dev/null | tee "$output/tools.txt"
case $step in build | first | all) build || exit 1 ;; *) require_build ;; esac
case $step in probe | test | first | all) probe || status=1 ;; esac
case $step in
  first) tests $((540 - SECONDS > 60 ? 540 - SECONDS : 60)) tests/ops || status=1 ;;
  test | all) tests "${TEST_SECONDS:-420}" "${all_tests[@]}" || status=1 ;;
esac
case $step in sanitize | second | all) sanitize || status=1 ;; esac
case $step in rates | second | all) rates || status=1 ;; esac
case $step in profile | second | all) profile ;; esac
case $step in benchmark | all) benchmark bfloat16 5 ;; third) benchmark bfloat16 6 ;; esac
case $step in benchmark | all) benchmark float32 2 ;; esac
exit "$status"
