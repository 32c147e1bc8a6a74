# Made by `anymamba export requirements-offline`. On a machine WITH network, with Windows and Python %%python%%:
#   powershell -ExecutionPolicy Bypass -File fetch.ps1
# then carry this folder over.
$ErrorActionPreference = 'Stop'
Set-Location -Path $PSScriptRoot

function Invoke-Step {
    param([string] $Title, [scriptblock] $Command)
    Write-Host "== $Title"
    & $Command
    if ($LASTEXITCODE -ne 0) {
        throw "$Title failed with exit code $LASTEXITCODE"
    }
}

Invoke-Step 'Fetching torch' { py -%%python%% -m pip download --dest wheels -r requirements-torch.txt }
Invoke-Step 'Fetching tools' { py -%%python%% -m pip download --dest wheels pip setuptools wheel }
Invoke-Step 'Fetching anymamba' { py -%%python%% -m pip wheel --wheel-dir wheels --find-links wheels -r requirements.txt }

if (-not (Test-Path 'fetch-environment')) {
    Invoke-Step 'Making an environment' { py -%%python%% -m venv fetch-environment }
}
$python = Join-Path $PSScriptRoot 'fetch-environment\Scripts\python.exe'
Invoke-Step 'Installing' { & $python -m pip install --no-index --find-links wheels -r requirements-offline.txt }
$env:ANYMAMBA_CACHE_DIR = Join-Path $PSScriptRoot 'cache'
Invoke-Step 'Fetching sources' { & $python -m anymamba install 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%' }
Remove-Item -Recurse -Force fetch-environment
Write-Host 'Fetched into wheels and cache. On the other machine: install-offline.ps1'
