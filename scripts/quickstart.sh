#!/usr/bin/env bash
# Installs what is missing, then trains a small mixture-of-experts language model and its dense
# counterpart and shows what the experts specialise in. Arguments go to scripts/quickstart.py.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
say "training"
exec "$python" scripts/quickstart.py "$@"
