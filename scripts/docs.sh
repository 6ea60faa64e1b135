#!/usr/bin/env bash
# Installs missing packages, then builds the documentation into build/docs and checks its links.
# The build needs no network if all packages are installed.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

say "documentation: build/docs/index.html"
"$python" docs/build.py
