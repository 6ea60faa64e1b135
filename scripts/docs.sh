#!/usr/bin/env bash
# Installs what is missing, then builds the documentation into build/docs and checks its links.
# Works offline. Arguments go to Sphinx: -E reads all pages again.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

say "documentation: build/docs/index.html"
"$python" -m sphinx -n -W --keep-going -q -b html "$@" docs build/docs
"$python" docs/check_links.py build/docs
