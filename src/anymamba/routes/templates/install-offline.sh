#!/bin/sh
# Made by `anymamba export requirements-offline`. On the machine WITHOUT network, after fetch.sh on another.
set -eu
cd "$(dirname "$0")"
python="${PYTHON:-python%%python%%}"
command -v "$python" >/dev/null 2>&1 || python=python3

[ -d .venv ] || "$python" -m venv .venv
.venv/bin/python -m pip install --no-index --find-links wheels -r requirements-offline.txt
ANYMAMBA_CACHE_DIR="$PWD/cache" .venv/bin/python -m anymamba install --offline 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%'
.venv/bin/python -m anymamba verify --quick
echo 'Done. Use it with:  . .venv/bin/activate'
