#!/usr/bin/env bash
# Installs what is missing, then builds the documentation into build/docs and checks its links.
# The build itself needs no network.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

say "documentation: build/docs/index.html"
"$python" docs/build.py
