#!/usr/bin/env bash
# Builds for this machine's GPU, runs the tests there and then the benchmarks: all of it, or one step.
#
#   scripts/gpu_suite.sh OUTPUT [build|test|sanitize|benchmark|all] [PYTHON]
#
# PYTHON (default python3) has torch for CUDA and pytest; nothing is downloaded, and what else is
# missing is left out with a word. On 16 cores no step should take ten minutes: build 5; test,
# sanitize and benchmark end after 9, 4 and 9. OUTPUT gets device.txt, build.log, info.txt,
# tests.log, sanitizer.log, and of the benchmark for each type a log, a JSON file that grows with
# every problem, its tables in Markdown, and our kernels by their time: a step that is ended leaves
# what it had. In the end OUTPUT.tar.gz, beside the folder, has all of it. The status is that of
# the build, the memory checks and the tests. The build's result is in OUTPUT too: on another
# machine of this kind `cp OUTPUT/_C*.so moe_ext/` does instead of that step.
set -uo pipefail

usage() { sed -n '4s/^#  *//p' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [ $# -le 3 ] || usage
step=${2:-all}
case $step in build | test | sanitize | benchmark | all) ;; *) usage ;; esac
mkdir -p "$1" || exit 2
output=$(cd "$1" && pwd)
python=$(command -v "${3:-python3}") || { echo "there is no ${3:-python3}" >&2; exit 2; }
bin=$(cd "$(dirname "$python")" && pwd)
python=$bin/$(basename "$python")
cd "$(dirname "$0")/.."
export PATH="$bin:$PATH"  # of ninja
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0  # float32 is float32
say() { printf '\n== %s\n' "$*"; }
has() { "$python" -c "import $1" 2> /dev/null; }
# Of a command under `timeout`, by its status.
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
    sys.exit(f"the build needs this Python's headers: there is no {headers}/Python.h")
END
  command -v ninja > /dev/null || echo "no ninja: one file is compiled after the other"
  local capability
  capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$capability}
  MOE_EXT_CUDA=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} "$python" setup.py build_ext --inplace \
    > "$output/build.log" 2>&1 ||
    { tail -n 40 "$output/build.log"; echo "the build failed: $output/build.log" >&2; return 1; }
  cp moe_ext/_C*.so "$output/"
  "$python" -m moe_ext.info 2>&1 | tee "$output/info.txt" || true  # its self-test is one of many
}

# What might hang goes first, after the first use of the device, which takes its time. An interrupt
# lets pytest say what has failed so far.
tests() {
  say "tests"
  local options=()
  timeout 60 "$python" -c 'import moe_ext, torch; torch.ones(1, device="cuda").item()' ||
    { echo "moe_ext and the device: $(outcome $?)"; return 1; }
  timeout 60 "$python" -m pytest -q -m cuda -k empty_expert -p no:cacheprovider \
    tests/ops/test_experts.py || echo "torch's grouped product, an expert without rows: $(outcome $?)"
  if has xdist; then options+=(-n 4); else echo "no pytest-xdist: one process"; fi
  if has pytest_timeout; then options+=(--timeout 90 --timeout-method thread); fi
  for package in filelock sacrebleu scipy sentencepiece tensorboard tqdm; do
    has "$package" || echo "no $package: the tests that need it fail"
  done
  timeout -k 15 -s INT 420 "$python" -m pytest -v --tb=short -m cuda -p no:cacheprovider \
    --continue-on-collection-errors --durations=10 ${options[@]+"${options[@]}"} 2>&1 |
    tee "$output/tests.log" | grep -v ' PASSED '
}

sanitize() {
  say "memory checks"
  if ! command -v compute-sanitizer > /dev/null; then
    echo "left out: there is no compute-sanitizer" | tee "$output/sanitizer.log"
    return 0
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 15 -s INT 240 compute-sanitizer --error-exitcode 99 \
    --report-api-errors no "$python" -m pytest -v -x -m cuda -p no:cacheprovider \
    -k "zero or empty or nan or one_expert or any_layout" tests/ops/test_dispatch.py \
    tests/ops/test_combine.py tests/ops/test_experts.py > "$output/sanitizer.log" 2>&1
  local status=$? passed
  passed=$(grep -c ' PASSED' "$output/sanitizer.log")
  tail -n 3 "$output/sanitizer.log"
  case $status in
    0) ;;
    99) echo "compute-sanitizer found something"; return 1 ;;
    124 | 137) echo "$(outcome "$status"): $passed tests passed before" ;;
    *) echo "the tests under compute-sanitizer: $(outcome "$status")"; return 1 ;;
  esac
}

benchmark() {
  local each dtype minutes
  for each in "bfloat16 5" "float32 2"; do
    read -r dtype minutes <<< "$each"
    say "benchmark, $dtype"
    timeout -k 15 -s INT $((60 * minutes + 45)) "$python" scripts/benchmarks/layer.py \
      --device cuda --dtype "$dtype" --seconds 1.5 --minutes "$minutes" \
      --peers "sort + split" "sort + grouped_mm" ScatterMoE "ScatterMoE GLU" \
      "HF eager" "HF grouped_mm" "HF batched_mm" --profile "$output/$dtype.kernels.txt" \
      --json "$output/$dtype.json" > "$output/$dtype.log" 2>&1 || tail -n 5 "$output/$dtype.log"
    [ -e "$output/$dtype.json" ] || continue
    "$python" scripts/benchmarks/layer.py --report "$output/$dtype.json" | tee "$output/$dtype.md"
  done
}

status=0
trap 'tar -czf "$output.tar.gz" -C "$(dirname "$output")" "$(basename "$output")"' EXIT
case $step in build | all) build || exit 1 ;; esac
case $step in test | all) tests || status=1 ;; esac
case $step in sanitize | all) sanitize || status=1 ;; esac
case $step in benchmark | all) benchmark ;; esac
exit "$status"
