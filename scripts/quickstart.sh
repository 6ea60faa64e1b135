#!/usr/bin/env bash
# Installs missing packages, trains a small mixture-of-experts language model and its dense
# counterpart, and shows the specialization of the experts. Passes its arguments to quickstart.py.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
say "training"
exec "$python" scripts/quickstart.py "$@"
