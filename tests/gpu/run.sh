#!/usr/bin/env bash
# The tests that need a CUDA device, on a machine that has one:  bash tests/gpu/run.sh [PYTHON]
# Fails instead of skipping when there is no device, so that a green run means that they ran.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${1:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
"$PYTHON" -c 'import sys, torch; ok = torch.cuda.is_available(); print(torch.__version__, torch.cuda.get_device_name() if ok else "no CUDA device"); sys.exit(not ok)'
exec "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider -p no:xdist
