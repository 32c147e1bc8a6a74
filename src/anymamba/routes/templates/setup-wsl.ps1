# Made by `anymamba export wsl`. In PowerShell:  powershell -ExecutionPolicy Bypass -File setup-wsl.ps1
# Checks WSL2 and the driver, installs %%distribution%% if it is not there, and runs setup-wsl.sh inside it.
$ErrorActionPreference = 'Stop'
$distribution = '%%distribution%%'
$wantsGpu = '%%gpu%%' -eq 'yes'

# wsl.exe writes UTF-16; this makes it UTF-8.
$env:WSL_UTF8 = '1'

if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
    throw 'wsl.exe was not found: Windows 10 2004 or newer is needed. As administrator:  wsl --install'
}
if ($wantsGpu) {
    # The driver lives in Windows; inside WSL none may be installed.
    if (-not (Get-Command nvidia-smi.exe -ErrorAction SilentlyContinue)) {
        Write-Warning 'nvidia-smi was not found: install the Windows driver of your card, or the GPU stays unseen in WSL.'
    }
}

$installed = (wsl.exe --list --quiet) -join "`n"
if ($installed -notmatch [regex]::Escape($distribution)) {
    Write-Host "== Installing $distribution (it asks for a user name and a password; type exit when its prompt comes)"
    wsl.exe --install --distribution $distribution
    if ($LASTEXITCODE -ne 0) {
        throw "wsl --install failed with exit code $LASTEXITCODE. Restart Windows and run this again; virtualisation must be on in the BIOS."
    }
}
wsl.exe --set-version $distribution 2

$folder = (wsl.exe --distribution $distribution --exec wslpath -a ($PSScriptRoot -replace '\\', '/')).Trim()
wsl.exe --distribution $distribution --cd $folder --exec bash ./setup-wsl.sh
if ($LASTEXITCODE -ne 0) {
    throw "setup-wsl.sh failed with exit code $LASTEXITCODE"
}
Write-Host "Done. Use it with:  wsl -d $distribution -- bash -lc '. ~/anymamba/bin/activate && python train.py'"
