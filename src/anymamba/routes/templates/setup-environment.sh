#!/bin/sh
# Made by `anymamba export environment`. In a shell:  sh setup-environment.sh
# Makes the environment .venv with Python %%python%%, installs torch, then anymamba, then mamba_ssm and causal_conv1d.
set -eu
cd "$(dirname "$0")"

interpreter=python%%python%%
command -v "$interpreter" >/dev/null 2>&1 || interpreter=python3
[ -d .venv ] || "$interpreter" -m venv .venv
python=.venv/bin/python

"$python" -m pip install --upgrade pip
"$python" -m pip install -r requirements-torch.txt
"$python" -m pip install -r requirements.txt
"$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())'
"$python" -m anymamba install 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%'
"$python" -m anymamba verify --quick
echo 'Done. Use it with:  . .venv/bin/activate'
