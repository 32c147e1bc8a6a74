#!/usr/bin/env bash
# Made by `anymamba export wsl`; runs inside WSL2. Makes the environment ~/anymamba.
set -euo pipefail
cd "$(dirname "$0")"
wants_gpu=%%gpu%%

if ! grep -qi microsoft /proc/version; then
    echo 'This is not WSL; use: anymamba export environment' >&2
    exit 1
fi
if ! grep -qi 'wsl2' /proc/version; then
    echo 'This may be WSL 1, which has no GPU: in Windows run  wsl --set-version %%distribution%% 2' >&2
fi
if [ "$wants_gpu" = yes ]; then
    if dpkg -l 2>/dev/null | grep -Eq '^ii +nvidia-driver'; then
        echo 'A Linux NVIDIA driver is installed inside WSL and hides the real one: sudo apt purge "nvidia-driver*"' >&2
        exit 1
    fi
    if ! /usr/lib/wsl/lib/nvidia-smi >/dev/null 2>&1; then
        echo 'The GPU is not seen: update the Windows driver, then in Windows  wsl --shutdown' >&2
    fi
    # Triton links libcuda at run time and looks here.
    export LD_LIBRARY_PATH="/usr/lib/wsl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

if ! python3 -m venv --help >/dev/null 2>&1 || ! python3 -c 'import ensurepip' >/dev/null 2>&1; then
    sudo apt-get update
    sudo apt-get install --no-install-recommends -y python3-venv
fi
# In the Linux file system: the Windows disks under /mnt are slow for thousands of small files.
[ -d "$HOME/anymamba" ] || python3 -m venv "$HOME/anymamba"
python="$HOME/anymamba/bin/python"
"$python" -m pip install --upgrade pip
"$python" -m pip install -r requirements-torch.txt
"$python" -m pip install -r requirements.txt
"$python" -m anymamba install 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%'
"$python" -m anymamba doctor || true
"$python" -m anymamba verify --quick
