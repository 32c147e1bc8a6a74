# Made by `anymamba export environment`. In PowerShell:  .\setup-environment.ps1
# Makes the environment .venv with Python %%python%%, installs torch, then anymamba, then mamba_ssm and causal_conv1d.
# If PowerShell refuses to run scripts:  powershell -ExecutionPolicy Bypass -File setup-environment.ps1
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

# Triton reads HOME, and compilers answer in the console's code page.
if (-not $env:HOME) { $env:HOME = $env:USERPROFILE }
$env:PYTHONUTF8 = '1'

if (-not (Test-Path '.venv')) {
    Invoke-Step 'Making .venv' { py -%%python%% -m venv .venv }
}
$python = Join-Path $PSScriptRoot '.venv\Scripts\python.exe'
Invoke-Step 'Updating pip' { & $python -m pip install --upgrade pip }
Invoke-Step 'Installing torch' { & $python -m pip install -r requirements-torch.txt }
Invoke-Step 'Installing anymamba' { & $python -m pip install -r requirements.txt }
Invoke-Step 'Checking torch' { & $python -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())' }
Invoke-Step 'Installing mamba_ssm and causal_conv1d' { & $python -m anymamba install 'mamba_ssm==%%mamba_ssm%%' 'causal_conv1d==%%causal_conv1d%%' }
Invoke-Step 'Proving it' { & $python -m anymamba verify --quick }
Write-Host 'Done. Use it with:  .venv\Scripts\activate'
