"""Machines built by hand: what the doctor would see on computers that are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anymamba.machine import Machine
from anymamba.machine.compilers import Compilers, Nvcc, Tool, VisualStudio
from anymamba.machine.driver import Card, Driver
from anymamba.machine.folders import Folders
from anymamba.machine.packages import Installed, Packages
from anymamba.machine.python import Python
from anymamba.machine.system import System
from anymamba.machine.torch_build import OperatorRun, Torch, TorchCard
from anymamba.machine.windows import Windows

RTX_3060 = Card("NVIDIA GeForce RTX 3060 Laptop GPU", (8, 6), 6.0)
VS_2022 = VisualStudio(
    "Visual Studio Community 2022",
    "17.8.34330.188",
    r"C:\Program Files\Microsoft Visual Studio\2022\Community",
    ("14.38.33130",),
)
NVCC_118 = Nvcc(r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA\v11.8\bin\nvcc.exe", "11.8", "CUDA_PATH")


def python(**changes: Any) -> Python:
    base = Python("3.10.11", "CPython", "/env/bin/python", "/env", "venv", False, 64, False, "24.0", True)
    return replace(base, **changes)


def torch(**changes: Any) -> Torch:
    base = Torch("2.1.1+cpu", "/env/torch", None, None, imports=True, numpy_works=True, new_abi=False, seconds=1.2)
    return replace(base, **changes)


def cuda_torch(**changes: Any) -> Torch:
    card = TorchCard(RTX_3060.name, (8, 6), works=True)
    base = torch(
        version="2.1.1+cu118", cuda="11.8", cuda_available=True, cards=(card,), architectures=("sm_80", "sm_86")
    )
    return replace(base, **changes)


def folders(**changes: Any) -> Folders:
    base = Folders(
        "/home/li", "/home/li", None, "/home/li/.cache/anymamba", True, 50.0, "/tmp", 50.0, "/env/lib", True, "/w"
    )
    return replace(base, **changes)


def windows_folders(**changes: Any) -> Folders:
    base = folders(
        home_variable=None,
        home=r"C:\Users\li",
        cache=r"C:\Users\li\AppData\Local\anymamba\Cache",
        temporary=r"C:\Users\li\AppData\Local\Temp",
        site_packages=r"C:\envs\m\Lib\site-packages",
        working=r"C:\work",
    )
    return replace(base, **changes)


def runs(*devices: str, backend: str = "torch") -> tuple[OperatorRun, ...]:
    names = ("causal_conv1d_fn", "selective_scan_fn")
    return tuple(OperatorRun(name, device, True, backend, seconds=0.01) for device in devices for name in names)


def cpu_ci(**changes: Any) -> Machine:
    """A Linux container in continuous integration: CPU torch, gcc, no card."""
    base = Machine(
        system=System("Linux", "6.1", "x86_64", 2, 7.8, "glibc 2.36"),
        python=python(version="3.12.4"),
        torch=torch(version="2.6.0+cpu", new_abi=True),
        driver=Driver(),
        triton=None,
        compilers=Compilers(gcc=Tool("/usr/bin/gcc", "12.2.0"), ninja=Tool("/usr/bin/ninja", "1.11.1")),
        windows=None,
        folders=folders(),
        packages=Packages((), (Installed("numpy", "2.1.0"), Installed("einops", "0.8.0"))),
        operators=runs("cpu"),
    )
    return replace(base, **changes)


def windows_laptop(**changes: Any) -> Machine:
    """A Chinese Windows laptop with an RTX 3060 and no compiler, where the default index gave CPU-only torch."""
    base = Machine(
        system=System("Windows", "11", "AMD64", 12, 15.8, language="zh_CN"),
        python=python(executable=r"C:\envs\m\python.exe", prefix=r"C:\envs\m", environment="conda"),
        torch=torch(),
        driver=Driver("546.33", "12.3", (RTX_3060,), on_bus=True),
        triton=None,
        compilers=Compilers(),
        windows=Windows("10.0.22631", long_paths=False, ansi_code_page=936, oem_code_page=936),
        folders=windows_folders(),
        packages=Packages((), (Installed("numpy", "1.26.4"), Installed("einops", "0.7.0"))),
        operators=runs("cpu"),
    )
    return replace(base, **changes)


def reference_workstation(**changes: Any) -> Machine:
    """The guide's own environment, complete."""
    base = windows_laptop(
        torch=cuda_torch(),
        compilers=Compilers(
            nvcc=(NVCC_118, Nvcc(r"C:\envs\m\Library\bin\nvcc.exe", "11.8", "conda")),
            visual_studio=(VS_2022,),
            windows_sdk=("10.0.22621.0",),
            ninja=Tool("ninja", "1.11.1"),
        ),
        packages=Packages(
            (),
            (
                Installed("numpy", "1.26.4"),
                Installed("einops", "0.7.0"),
                Installed("torchvision", "0.16.1+cu118"),
                Installed("torchaudio", "2.1.1+cu118"),
            ),
        ),
        operators=runs("cuda", "cpu"),
    )
    return replace(base, **changes)


def locked_server(**changes: Any) -> Machine:
    """A shared Linux server: a driver for CUDA 11.4, no compiler, site-packages and home read-only."""
    base = cpu_ci(
        system=System("Linux", "3.10", "x86_64", 64, 503.0, "glibc 2.17"),
        torch=torch(version="2.4.0+cu121", cuda="12.1"),
        driver=Driver("470.82.01", "11.4", (Card("Tesla V100-SXM2-32GB", (7, 0), 32.0),), on_bus=True),
        compilers=Compilers(),
        folders=folders(site_packages_writable=False, cache_writable=False),
    )
    return replace(base, **changes)


def broken_torch(**changes: Any) -> Machine:
    """A Windows machine where `import torch` dies in a DLL."""
    problem = (
        "OSError: [WinError 126] The specified module could not be found. "
        r'Error loading "C:\envs\m\Lib\site-packages\torch\lib\fbgemm.dll" or one of its dependencies.'
    )
    base = windows_laptop(torch=torch(version="2.4.0+cu121", cuda="12.1", imports=False, problem=problem), operators=())
    return replace(base, **changes)


def no_torch(**changes: Any) -> Machine:
    """The laptop before anything is installed."""
    return replace(windows_laptop(torch=None, operators=()), **changes)


ALL = (cpu_ci, windows_laptop, reference_workstation, locked_server, broken_torch, no_torch)
