#!/usr/bin/env bash
# Installs missing packages, trains a small mixture-of-experts language model and its dense
# counterpart, and shows the specialization of the experts. Passes its arguments to the command.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
say "training"
exec "$python" -m moe_lab quickstart "$@"
