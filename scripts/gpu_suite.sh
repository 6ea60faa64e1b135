#!/usr/bin/env bash
# Builds for this machine's GPU, runs the tests there and then the benchmarks.
#
#   scripts/gpu_suite.sh OUTPUT [PYTHON]
#
# PYTHON (default python3) has torch for CUDA and pytest; nothing is downloaded, and what else is
# missing is left out with a word. OUTPUT gets device.txt, build.log, tests.log, sanitizer.log,
# benchmark.log and benchmark.json. The status is that of the tests.
set -uo pipefail

[ $# -ge 1 ] || { echo "usage: scripts/gpu_suite.sh OUTPUT [PYTHON]" >&2; exit 2; }
mkdir -p "$1"
output=$(cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }

say "device"
"$python" - << 'END' | tee "$output/device.txt" || exit 2
import torch
assert torch.cuda.is_available(), "torch sees no GPU"
device = torch.cuda.get_device_properties(0)
print(f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
END

say "build"
capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$capability} MOE_EXT_CUDA=1
MAX_JOBS=${MAX_JOBS:-$(nproc)} "$python" setup.py build_ext --inplace > "$output/build.log" 2>&1 ||
  { tail -n 40 "$output/build.log"; echo "the build failed: $output/build.log" >&2; exit 1; }
"$python" -m moe_ext.info | tee -a "$output/device.txt"

say "tests"
"$python" -m pytest -q -m cuda -p no:cacheprovider 2>&1 | tee "$output/tests.log"
status=${PIPESTATUS[0]}

say "memory checks"
if command -v compute-sanitizer > /dev/null; then
  timeout 300 compute-sanitizer --error-exitcode 1 "$python" -m pytest -q -x -m cuda \
    tests/test_dispatch.py tests/test_combine.py > "$output/sanitizer.log" 2>&1 ||
    { echo "compute-sanitizer found something: $output/sanitizer.log"; status=1; }
  tail -n 3 "$output/sanitizer.log"
else
  echo "left out: there is no compute-sanitizer" | tee "$output/sanitizer.log"
fi

say "benchmark"
"$python" scripts/benchmark_layer.py --device cuda --json "$output/benchmark.json" 2>&1 |
  tee "$output/benchmark.log"
exit "$status"
