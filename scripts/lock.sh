#!/usr/bin/env bash
# Writes the files of requirements/: the versions and hashes that scripts/setup.sh installs.
#
#   scripts/lock.sh             # keeps the versions; adds and removes packages
#   scripts/lock.sh --upgrade   # takes the newest versions
#
# Needs uv (`pip install uv`). A package has the same version in all files. torch and its libraries
# are only in torch.txt, which lab.txt and test.txt include. The CUDA toolkit of cuda.txt is older
# than that of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv > /dev/null || { echo "moe_ext: found no uv (pip install uv)" >&2; exit 2; }
groups="build docs style"  # without torch

compile() {
  uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header "$@"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 'torch>=2.11' > "$work/torch.in"
echo uv > "$work/uv.in"
echo "moe_ext; python_version < '0'" > "$work/local.txt"  # is not on PyPI

# One resolution for all files.
if [ "${1:-}" != --upgrade ]; then
  find requirements -name '*.txt' ! -name cuda.txt -exec grep -hv '^-r' {} + > "$work/all.txt"
fi
compile "$work/torch.in" lab/pyproject.toml --overrides "$work/local.txt" \
  $(printf -- '--group %s ' $groups test) -o "$work/all.txt" > /dev/null

# write NAME ARGUMENTS: writes requirements/NAME.txt, with the lines of stdin first.
write() {
  { echo "# Written by scripts/lock.sh."; cat; compile --generate-hashes "${@:2}"; } > "$work/$1"
  mv "$work/$1" "requirements/$1.txt"
}
same=(-c "$work/all.txt")
for group in $groups; do write "$group" "${same[@]}" --group "$group" < /dev/null; done
write cuda --group cuda < /dev/null
write uv "$work/uv.in" < /dev/null
write torch "${same[@]}" "$work/torch.in" < /dev/null
in_torch=$(sed -n 's/^\([a-z][a-z0-9-]*\)==.*/--no-emit-package \1/p' requirements/torch.txt)
write lab "${same[@]}" $in_torch --overrides "$work/local.txt" lab/pyproject.toml <<< '-r torch.txt'
write test "${same[@]}" $in_torch --group test <<< '-r torch.txt'
