#!/bin/sh
# Made by `anymamba export requirements-offline`. On a machine WITH network, of the same system, processor and
# Python (%%python%%) as the one without:  sh fetch.sh ; then carry this folder over.
set -eu
cd "$(dirname "$0")"
python="${PYTHON:-python%%python%%}"
command -v "$python" >/dev/null 2>&1 || python=python3

"$python" -m pip download --dest wheels -r requirements-torch.txt
"$python" -m pip download --dest wheels pip setuptools wheel
"$python" -m pip wheel --wheel-dir wheels --find-links wheels -r requirements.txt

# Upstream's source archives go into a cache of their own, which travels too.
[ -d fetch-environment ] || "$python" -m venv fetch-environment
fetch-environment/bin/python -m pip install --no-index --find-links wheels -r requirements-offline.txt
ANYMAMBA_CACHE_DIR="$PWD/cache" fetch-environment/bin/python -m anymamba install 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%'
rm -rf fetch-environment
echo 'Fetched into wheels and cache. On the other machine: sh install-offline.sh'
