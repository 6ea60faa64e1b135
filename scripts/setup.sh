# Sourced by docs.sh, quickstart.sh and test.sh. Creates a virtual environment with torch, the
# packages that the scripts need, and moe_ext built in place. Installs the versions of
# requirements/, and checks their hashes. Rebuilds the extension only if its sources have changed.
#
# A build in place would break another environment that uses moe_ext from this folder. Then this
# environment gets a copy of the folder instead. A script that sets in_place=required stops.
#
# PYTHON is the interpreter (default python3). MOE_EXT_VENV is the folder of the environment
# (default .venv). MOE_EXT_LOCKED=0 keeps installed packages and installs missing ones in their
# newest versions, or those of PIP_CONSTRAINT.

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'moe_ext: %s\n' "$*" >&2; exit 2; }

# Without files of bytecode, each process would compile the modules that it imports again.
unset PYTHONDONTWRITEBYTECODE
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${MOE_EXT_VENV:-.venv}
base=${PYTHON:-python3}

command -v "$base" > /dev/null || fail "PYTHON: found no $base; install Python 3.11 or later, or set PYTHON"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "PYTHON: $base must be Python 3.11 or later, got $("$base" --version)"
${CXX:-c++} --version > /dev/null 2>&1 ||  # CXX may be several words, such as "ccache g++"
  fail "found no C++ compiler ${CXX:-c++}: install one (Debian: apt-get install g++), or set CXX"
[ -e "$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
  fail "found no Python.h for $base: install Python's headers (Debian: apt-get install python3-dev)"

# setup.py writes built_by.txt: the environment that built the library in moe_ext/lib, and the folder.
copy=
{ read -r owner && read -r folder; } 2> /dev/null < moe_ext/lib/built_by.txt || folder=
if [ "$folder" = "$(pwd -P)" ] && [ -d "$owner/bin" ] && [ "$owner" != "$(realpath -m "$venv")" ]; then
  [ "${in_place:-}" != required ] ||
    fail "the environment $owner uses the library in moe_ext/lib, which a build for $venv would" \
      "replace. Set MOE_EXT_VENV=$owner MOE_EXT_LOCKED=0 to install the missing packages there, or" \
      "work in a copy of this folder, or remove moe_ext/lib"
  copy=yes
  export PYTHONSAFEPATH=1  # imports the installed package, not that of this folder
fi

if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
  [ -e "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv" 2> /dev/null)" ] ||
    fail "MOE_EXT_VENV: $venv must be a virtual environment or a new folder, got a folder with other files"
  say "creating a virtual environment in $venv"
  "$base" -m venv "$venv" ||  # keeps the packages of an environment without pip
    fail "cannot create a virtual environment in $venv (Debian: apt-get install python3-venv)"
fi
python=$venv/bin/python
PATH=$(realpath -s "$venv/bin"):$PATH  # a build by another version of ninja starts anew
export PATH

# The name of the marker of a finished build: the folder and the contents of the sources, and whether
# CUDA was asked for. A build with CUDA also serves a command that does not ask for it.
files="setup.py pyproject.toml lab/pyproject.toml requirements scripts/setup.sh csrc moe_ext/include"
sources=$({ pwd; find $files ${copy:+moe_ext moe_ext_command.py lab configs} -type f \
  ! -path '*/lib/*' ! -path '*/build/*' ! -name '*.so' ! -name '*.pyc' ! -path '*.egg-info/*' \
  -print0 | LC_ALL=C sort -z | xargs -0 cat; } | sha256sum | cut -c1-16)
# The import fails if another environment has since built the sources for its version of torch.
marker=$venv/moe_ext-$sources${TORCH_CUDA_ARCH_LIST:+-cuda}
if ! compgen -G "$marker*" > /dev/null || ! "$python" -c 'import moe_ext, moe_lab' 2> /dev/null; then
  "$python" -c 'import torch' 2> /dev/null || say "installing torch (downloads several gigabytes the first time)"
  if [ "${MOE_EXT_LOCKED:-1}" = 1 ]; then
    locked=$(printf -- '-r requirements/%s.txt ' build docs lab style test)
    # uv takes less than half of the time of pip, but does not read the configuration of pip.
    "$python" -m pip install --require-hashes -r requirements/uv.txt
    "$venv/bin/uv" pip install --system-certs --python "$python" --require-hashes $locked ||
      # Python compiles the modules that it imports; compiling all 15,000 takes most of a minute.
      "$python" -m pip install --require-hashes --no-compile --progress-bar on $locked
    dependencies=--no-deps  # all installed
  else
    dependencies="--group test --group docs --group style --group build"
    "$python" -m pip install --progress-bar on 'pip>=25.1' 'torch>=2.11' 'setuptools>=77' wheel ninja
  fi
  say "building the extension (two to five minutes on 2 cores) and installing the lab"
  rm -rf lab/build  # may hold modules that are gone
  if [ -n "$copy" ]; then packages=". ./lab"; else packages="-e . -e ./lab"; fi
  "$python" -m pip install $dependencies --no-build-isolation $packages
  rm -f "$venv"/moe_ext-*
  touch "$marker"
fi
