"""Is torch there, does it live, and is it the build for this machine's card? (The guide's three checks, and why they fail.)"""

from __future__ import annotations

import re

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.doctor.torch_index import install_command
from anymamba.machine import Machine


def torch_installed(machine: Machine) -> Result:
    """Any torch."""
    if machine.torch is not None:
        return Result(
            "torch-installed", "torch", Status.OK, Way.BOTH, seen=machine.torch.version, wanted="2.1 or newer"
        )
    return Result(
        "torch-installed",
        "torch",
        Status.FAIL,
        Way.BOTH,
        seen="not installed",
        wanted="2.1 or newer",
        why="everything computes with it; anymamba never installs it because which build is right is your choice",
        fix=install_command(machine),
    )


def torch_imports(machine: Machine) -> Result | None:
    """`import torch` in a process of its own."""
    torch = machine.torch
    if torch is None:
        return None
    if torch.imports:
        return Result(
            "torch-imports",
            "import torch",
            Status.WARN if torch.problem else Status.OK,
            Way.BOTH,
            seen=torch.problem or f"works ({torch.seconds:g} s)",
            wanted="works",
        )
    return Result(
        "torch-imports",
        "import torch",
        Status.FAIL,
        Way.BOTH,
        seen=torch.problem,
        wanted="works",
        why=_import_cause(torch.problem),
        fix=_import_cure(machine, torch.problem),
    )


def _import_cause(problem: str) -> str:
    if "DLL load failed" in problem or "WinError 126" in problem or "WinError 127" in problem:
        return "a DLL that torch needs is missing or too old: usually the Microsoft Visual C++ runtime"
    if "WinError 1114" in problem:
        return "a DLL of torch failed to start: an old Visual C++ runtime, or another library loaded its own copy first"
    if "undefined symbol" in problem or "cannot open shared object" in problem:
        return "libraries of different builds are mixed (conda and pip, two CUDA versions, LD_LIBRARY_PATH)"
    if "no answer" in problem:
        return "the import hung: a virus scanner, a network drive or a stuck driver"
    return "the installation is damaged or mixed"


def _import_cure(machine: Machine, problem: str) -> str:
    if machine.system.name == "Windows" and re.search(r"DLL|WinError", problem):
        return 'winget install Microsoft.VCRedist.2015+.x64    (then: python -c "import torch")'
    return install_command(machine, again=True)


def torch_release(machine: Machine) -> Result | None:
    """2.1 or newer."""
    torch = machine.torch
    if torch is None or torch.release >= (2, 1) or torch.version == "unknown":
        return None
    return Result(
        "torch-release",
        "torch version",
        Status.FAIL,
        Way.BOTH,
        seen=torch.version,
        wanted="2.1 or newer",
        why="the operators use what torch has since 2.1",
        fix=install_command(machine),
    )


def torch_cuda_build(machine: Machine) -> Result | None:
    """torch.version.cuda against the card: a CPU-only torch beside an NVIDIA card is the common Windows trap."""
    torch = machine.torch
    if torch is None or machine.system.name == "Darwin":
        return None
    built_for = (torch.cuda and f"CUDA {torch.cuda}") or (torch.hip and f"ROCm {torch.hip}")
    has_card = bool(machine.driver.cards) or machine.driver.on_bus
    if built_for or not has_card:
        return Result(
            "torch-cuda-build",
            "torch.version.cuda",
            Status.OK if built_for else Status.INFO,
            Way.BOTH,
            seen=built_for or "CPU only (and no NVIDIA card here)",
            wanted="a CUDA build where there is an NVIDIA card",
        )
    card = machine.driver.cards[0].name if machine.driver.cards else "an NVIDIA card"
    return Result(
        "torch-cuda-build",
        "torch.version.cuda",
        Status.WARN,
        Way.BOTH,
        seen=f"CPU only, beside {card}",
        wanted="a CUDA build of torch",
        why="the card lies idle; the default index serves CPU-only torch for Windows",
        fix=install_command(machine, again=True),
    )


def torch_cuda_available(machine: Machine) -> Result | None:
    """torch.cuda.is_available(), and if not, why not."""
    torch = machine.torch
    if torch is None or not torch.imports or not (torch.cuda or torch.hip):
        return None
    if torch.cuda_available:
        return Result(
            "torch-cuda-available", "torch.cuda.is_available()", Status.OK, Way.BOTH, seen="True", wanted="True"
        )
    driver, release = machine.driver, machine.driver.cuda_release
    status, why, fix = Status.INFO, "no NVIDIA card was found: torch computes on the CPU", ""
    if torch.cuda and release is not None and release[0] < int(torch.cuda.split(".")[0]):
        status = Status.FAIL
        why = f"driver {driver.version} runs CUDA up to {driver.cuda}; this torch needs CUDA {torch.cuda}"
        fix = f"update the NVIDIA driver, or: {install_command(machine, again=True)}"
    elif driver.cards:
        status = Status.FAIL
        why = (
            "the driver sees a card, torch does not: CUDA_VISIBLE_DEVICES, a container without GPU, or a broken context"
        )
        fix = for_system(machine, windows="set CUDA_VISIBLE_DEVICES=", linux="unset CUDA_VISIBLE_DEVICES")
        if machine.system.wsl:
            fix = "wsl --shutdown    (in Windows; update the Windows driver, install none inside WSL)"
    elif driver.on_bus:
        status = Status.FAIL
        why = f"an NVIDIA card is in this machine but its driver does not answer: {driver.problem or 'not installed'}"
        fix = for_system(
            machine,
            windows="install the driver for your card from nvidia.com/drivers and restart",
            linux="install the distribution's NVIDIA driver package and restart; then: nvidia-smi",
        )
    return Result("torch-cuda-available", "torch.cuda.is_available()", status, Way.BOTH, "False", "True", why, fix)


def torch_runs_on_card(machine: Machine) -> Result | None:
    """A small kernel really runs on each card ("no kernel image is available" shows here)."""
    torch = machine.torch
    if torch is None or not torch.cards:
        return None
    broken = [card for card in torch.cards if not card.works]
    if not broken:
        names = ", ".join(f"{card.name} (sm_{card.capability[0]}{card.capability[1]})" for card in torch.cards)
        return Result("torch-runs-on-card", "1 + 1 on the card", Status.OK, Way.BOTH, seen=names, wanted="2")
    card = broken[0]
    no_image = "no kernel image" in card.problem
    return Result(
        "torch-runs-on-card",
        "1 + 1 on the card",
        Status.FAIL,
        Way.BOTH,
        seen=f"{card.name}: {card.problem}",
        wanted="2",
        why=f"this torch has kernels for {', '.join(torch.architectures)} only; the card is "
        f"sm_{card.capability[0]}{card.capability[1]}"
        if no_image
        else "the card refuses work: another process, its memory, or the driver",
        fix=install_command(machine, again=True) if no_image else "nvidia-smi    (shows who holds the card)",
    )


def numpy_for_torch(machine: Machine) -> Result | None:
    """NumPy 2 came after torch 2.1 and 2.2 were built."""
    torch, numpy = machine.torch, machine.packages.version("numpy")
    if torch is None or numpy is None:
        return None
    clash = torch.release < (2, 3) and int(numpy.split(".")[0]) >= 2
    broken = torch.imports and torch.numpy_works is False
    return Result(
        "numpy-for-torch",
        "NumPy with torch",
        Status.FAIL if broken else Status.WARN if clash else Status.OK,
        Way.BOTH,
        seen=f"numpy {numpy}" + (" (tensor.numpy() fails)" if broken else ""),
        wanted="below 2 for torch 2.1 and 2.2" if torch.release < (2, 3) else "any",
        why='torch below 2.3 was compiled against NumPy 1: "Numpy is not available"' if clash or broken else "",
        fix='python -m pip install "numpy<2"' if clash else install_command(machine, again=True) if broken else "",
    )


def torch_companions(machine: Machine) -> Result | None:
    """Torchvision 0.(N+15) and torchaudio 2.N belong to torch 2.N; a stray one breaks the import of transformers."""
    torch = machine.torch
    if torch is None or torch.release[0] != 2:
        return None
    wanted = {"torchvision": f"0.{torch.release[1] + 15}", "torchaudio": f"2.{torch.release[1]}"}
    have = {name: version for name in wanted if (version := machine.packages.version(name)) is not None}
    if torch.release[1] > 8:
        have.pop("torchaudio", None)  # torchaudio no longer follows torch's numbers from then on
    wrong = [f"{name} {version}" for name, version in have.items() if not version.startswith(wanted[name] + ".")]
    if not wrong:
        return None
    return Result(
        "torch-companions",
        "torchvision, torchaudio",
        Status.WARN,
        Way.BOTH,
        seen=", ".join(wrong),
        wanted=", ".join(f"{name} {wanted[name]}.*" for name in have),
        why=f'built for another torch than {torch.version}: "operator torchvision::nms does not exist"',
        fix="python -m pip install --no-deps " + " ".join(f'"{name}=={wanted[name]}.*"' for name in have),
    )


def one_of_each(machine: Machine) -> Result | None:
    """Two installations of one package in the same environment (conda and pip mixed)."""
    doubled = machine.packages.duplicated
    if not doubled:
        return None
    return Result(
        "one-of-each",
        "Installed twice",
        Status.WARN,
        Way.BOTH,
        seen=", ".join(doubled),
        wanted="one version of each",
        why='which one is imported is chance; mixed files end in "DLL load failed" or "undefined symbol"',
        fix=f"python -m pip uninstall {' '.join(doubled)}    (until none is left, then install once)",
    )
