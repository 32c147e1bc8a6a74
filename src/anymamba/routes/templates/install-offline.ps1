# Made by `anymamba export requirements-offline`. On the machine WITHOUT network, after fetch.ps1 on another:
#   powershell -ExecutionPolicy Bypass -File install-offline.ps1
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

if (-not (Test-Path '.venv')) {
    Invoke-Step 'Making .venv' { py -%%python%% -m venv .venv }
}
$python = Join-Path $PSScriptRoot '.venv\Scripts\python.exe'
Invoke-Step 'Installing' { & $python -m pip install --no-index --find-links wheels -r requirements-offline.txt }
$env:ANYMAMBA_CACHE_DIR = Join-Path $PSScriptRoot 'cache'
Invoke-Step 'Installing mamba_ssm and causal_conv1d' { & $python -m anymamba install --offline 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%' }
Invoke-Step 'Proving it' { & $python -m anymamba verify --quick }
Write-Host 'Done. Use it with:  .venv\Scripts\activate'
