"""Machines with something odd about them, and which check must say so: one table, for the checks, their Chinese, the catalogue.

A row is a machine, the id of a check, and the status that it must answer with ("absent": it says nothing).
"""

from __future__ import annotations

from dataclasses import replace

import machines
from anymamba.machine import Machine
from anymamba.machine.compilers import Compilers, Nvcc, Tool, VisualStudio
from anymamba.machine.driver import Card, Driver
from anymamba.machine.extensions import Extension
from anymamba.machine.network import Network
from anymamba.machine.packages import Installed, Packages, Upstream
from anymamba.machine.project import Project
from anymamba.machine.reach import Reached
from anymamba.machine.system import System
from anymamba.machine.torch_build import OperatorRun, TorchCard
from anymamba.machine.triton import Triton
from anymamba.machine.wsl import Wsl


def laptop(**changes: object) -> Machine:
    return machines.reference_workstation(**changes)


def with_driver(cuda: str | None, *capabilities: tuple[int, int]) -> Machine:
    cards = tuple(Card("card", capability, 8.0) for capability in capabilities)
    return machines.cpu_ci(driver=Driver("1" if cuda else None, cuda, cards, on_bus=bool(cards)))


def compilers(**changes: object) -> Compilers:
    return replace(machines.reference_workstation().compilers, **changes)  # type: ignore[arg-type]


NEW_STUDIO = VisualStudio("Visual Studio 2022", "17.14.1", r"C:\VS", ("14.44.35207",))
BOTH_TOOLSETS = VisualStudio("Visual Studio 2022", "17.14.1", r"C:\VS", ("14.44.35207", "14.38.33130"))
NVCC_124 = Nvcc("nvcc", "12.4", "PATH")
BLACKWELL = Driver("570.1", "12.8", (Card("RTX 5090", (12, 0), 32.0),), on_bus=True)


def linux(**changes: object) -> Machine:
    return machines.cpu_ci(torch=machines.cuda_torch(), **changes)


def gcc(version: str, nvcc: str) -> Compilers:
    return Compilers(nvcc=(Nvcc("/cuda/bin/nvcc", nvcc, "PATH"),), gcc=Tool("gcc", version))


def extension(
    problem: str = "", name: str = "selective_scan_cuda", glibc: tuple[int, int] | None = (2, 28)
) -> Extension:
    return Extension(name, f"/env/lib/{name}.so", not problem, problem, glibc)


def upstream(mamba: str, convolution: str, kind: str = "native") -> Packages:
    return Packages(
        (
            Upstream("mamba_ssm", mamba, "/env", kind, "x.so"),
            Upstream("causal_conv1d", convolution, "/env", kind, "y.so"),
        ),
        (Installed("einops", "0.8.0"),),
    )


def reached(index: str = "", github: str = "") -> tuple[Reached, ...]:
    return (
        Reached("index", "https://mirror.example/simple/mamba-ssm/", 0.4, index),
        Reached("GitHub", "https://github.com/", 0.4, github),
    )


def card(name: str, capability: tuple[int, int]) -> Driver:
    return Driver("570.1", "12.8", (Card(name, capability, 16.0),), on_bus=True)


REFUSED = "SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"
VIM = Project(
    "/w/Vim",
    imports=(("selective_scan_cuda", "mamba-1p1p1/mamba_ssm/ops/selective_scan_interface.py"),),
    fork=(("bimamba_type", "vim/models_mamba.py"),),
    vendored=("mamba-1p1p1/mamba_ssm",),
    missing=("selective_scan_cuda",),
)
VIM_FIRST = replace(VIM, imported="/w/mamba_ssm/__init__.py", imported_is_fork=True)
VMAMBA = Project(
    "/w/VMamba", imports=(("selective_scan_cuda_oflex", "vmamba.py"),), missing=("selective_scan_cuda_oflex",)
)
PLAIN = Project("/w/scan", imports=(("selective_scan_cuda", "scan.py"),), missing=("selective_scan_cuda",))
CONDAS_NVCC = Nvcc(r"C:\envs\m\bin\nvcc.exe", "11.8", "conda", ("cusparse.h",))


ODD: list[tuple[Machine, str, str]] = [
    (machines.cpu_ci(python=machines.python(version="3.9.2")), "python-version", "fail"),
    (machines.cpu_ci(python=machines.python(version="3.15.0")), "python-version", "warn"),
    (machines.cpu_ci(python=machines.python(bits=32)), "python-kind", "fail"),
    (machines.cpu_ci(python=machines.python(free_threaded=True)), "python-kind", "warn"),
    (machines.cpu_ci(python=machines.python(externally_managed=True)), "python-environment", "warn"),
    (machines.cpu_ci(python=machines.python(pip=None)), "python-pip", "fail"),
    (machines.cpu_ci(torch=machines.torch(version="1.13.1")), "torch-release", "fail"),
    # NumPy 2 against torch 2.1
    (laptop(packages=Packages((), (Installed("numpy", "2.0.1"),))), "numpy-for-torch", "warn"),
    (
        machines.cpu_ci(torch=machines.torch(numpy_works=False)),
        "numpy-for-torch",
        "fail",
    ),
    (machines.cpu_ci(), "numpy-for-torch", "ok"),
    (machines.cpu_ci(packages=Packages((), (Installed("torchvision", "0.16.1"),))), "torch-companions", "warn"),
    (machines.cpu_ci(packages=Packages((), (Installed("torchvision", "0.21.0"),))), "torch-companions", "absent"),
    (machines.cpu_ci(packages=Packages((), (), ("torch",))), "one-of-each", "warn"),
    # a card that torch cannot see
    (laptop(torch=machines.cuda_torch(cuda_available=False, cards=())), "torch-cuda-available", "fail"),
    (
        machines.cpu_ci(torch=machines.cuda_torch(cuda_available=False, cards=())),
        "torch-cuda-available",
        "info",
    ),
    (
        laptop(torch=machines.cuda_torch(cards=(TorchCard("5090", (12, 0), False, "no kernel image is available"),))),
        "torch-runs-on-card",
        "fail",
    ),
    (machines.cpu_ci(driver=Driver(on_bus=True, problem="nvmlInit_v2 answers 9")), "gpu-seen", "warn"),
    (with_driver("12.2", (6, 1)), "gpu-architecture", "warn"),
    # operators
    (
        machines.cpu_ci(operators=(OperatorRun("selective_scan_fn", "cpu", False, problem="RuntimeError: x"),)),
        "operators-run",
        "fail",
    ),
    (machines.cpu_ci(operators=()), "operators-run", "absent"),
    # packages
    (
        machines.cpu_ci(packages=Packages((Upstream("mamba_ssm", "1.0.1", "/env", "foreign", None),), ())),
        "mamba-ssm-installed",
        "warn",
    ),
    (
        machines.cpu_ci(packages=Packages((Upstream("mamba_ssm", "2.2.2+anymamba.1", "/env", "port", "x"),), ())),
        "mamba-ssm-installed",
        "ok",
    ),
    (machines.cpu_ci(folders=machines.folders(shadowed=("mamba_ssm",))), "not-shadowed", "warn"),
    (
        machines.cpu_ci(
            packages=Packages(
                (Upstream("mamba_ssm", "2.2.2", "/env", "native", "x.so"),), (Installed("transformers", "5.0.0"),)
            )
        ),
        "transformers-for-upstream",
        "warn",
    ),
    # network
    (machines.cpu_ci(), "proxy-addresses", "absent"),
    (machines.cpu_ci(network=Network((("HTTPS_PROXY", "127.0.0.1:7890"),))), "proxy-addresses", "warn"),
    (machines.cpu_ci(network=Network((("HTTPS_PROXY", "https://127.0.0.1:7890"),))), "proxy-addresses", "warn"),
    (machines.cpu_ci(network=Network((("HTTPS_PROXY", "http://proxy.example:80"),))), "proxy-addresses", "info"),
    (
        machines.cpu_ci(network=Network((), (("PIP_CERT", "/gone.pem"),), ("PIP_CERT",))),
        "certificate-files",
        "warn",
    ),
    # WSL
    (machines.cpu_ci(), "wsl-version", "absent"),
    (machines.cpu_ci(wsl=Wsl(1, False, False)), "wsl-version", "warn"),
    (machines.cpu_ci(wsl=Wsl(2, True, True)), "wsl-version", "warn"),
    (machines.cpu_ci(wsl=Wsl(2, True, False)), "wsl-version", "ok"),
    (
        machines.cpu_ci(wsl=Wsl(2, True, False), python=machines.python(prefix="/mnt/d/env")),
        "wsl-folder",
        "warn",
    ),
    # HOME
    (machines.windows_laptop(), "home-variable", "info"),
    (machines.windows_laptop(triton=Triton("triton", "2.0.0")), "home-variable", "warn"),
    (machines.cpu_ci(folders=machines.folders(home_variable=None, home=None)), "home-variable", "warn"),
    (machines.cpu_ci(folders=machines.folders(cache_free_gb=0.1)), "disk-space", "warn"),
    # Windows
    (machines.windows_laptop(), "long-paths", "info"),
    (
        machines.windows_laptop(folders=machines.windows_folders(site_packages="C:\\" + "x" * 130)),
        "long-paths",
        "warn",
    ),
    (machines.windows_laptop(), "code-page", "warn"),
    (
        machines.windows_laptop(folders=machines.windows_folders(temporary=r"C:\Users\李\Temp")),
        "ascii-folders",
        "warn",
    ),
    # compilers
    (laptop(), "visual-studio", "ok"),
    (machines.windows_laptop(), "visual-studio", "fail"),
    (machines.cpu_ci(), "visual-studio", "absent"),
    (laptop(compilers=compilers(windows_sdk=())), "windows-sdk", "fail"),
    (laptop(compilers=compilers(visual_studio=(NEW_STUDIO,))), "studio-for-cuda", "fail"),
    (laptop(compilers=compilers(visual_studio=(BOTH_TOOLSETS,))), "studio-for-cuda", "warn"),
    (
        laptop(compilers=compilers(visual_studio=(NEW_STUDIO,), nvcc=(NVCC_124,))),
        "studio-for-cuda",
        "ok",
    ),
    (laptop(compilers=compilers(nvcc=(NVCC_124,))), "nvcc-matches-torch", "fail"),
    (laptop(compilers=compilers(nvcc=(Nvcc("nvcc", "11.7", "PATH"),))), "nvcc-matches-torch", "warn"),
    (laptop(compilers=compilers(nvcc=())), "nvcc-found", "fail"),
    (laptop(driver=BLACKWELL), "nvcc-knows-card", "fail"),
    (laptop(), "nvcc-knows-card", "absent"),
    (linux(compilers=gcc("13.2.0", "11.8")), "host-compiler", "fail"),
    (linux(compilers=gcc("11.4.0", "11.8")), "host-compiler", "ok"),
    (linux(compilers=gcc("4.8.5", "11.8")), "host-compiler", "fail"),
    (linux(compilers=gcc("13.2.0", "12.4")), "host-compiler", "ok"),
    (machines.cpu_ci(), "cuda-torch", "fail"),
    (laptop(compilers=compilers(ninja=None)), "ninja-found", "warn"),
    (machines.cpu_ci(system=System("Linux", "6", "x86_64", 16, 15.0)), "build-memory", "warn"),
    (
        laptop(compilers=compilers(variables=(("MAMBA_FORCE_BUILD", "1"),))),
        "build-variables",
        "warn",
    ),
    (laptop(compilers=compilers(variables=(("MAMBA_FORCE_BUILD", "TRUE"),))), "build-variables", "absent"),
    # compiled extensions
    (machines.cpu_ci(), "extensions-load", "absent"),
    (linux(extensions=(extension(),)), "extensions-load", "ok"),
    (linux(extensions=(extension("ImportError: x.so: undefined symbol: _ZN3c105ErrorC2"),)), "extensions-load", "fail"),
    (
        linux(extensions=(extension("ImportError: libcudart.so.11.0: cannot open shared object file"),)),
        "extensions-load",
        "fail",
    ),
    (linux(extensions=(extension("ImportError: version 'GLIBC_2.38' not found"),)), "extensions-load", "fail"),
    (
        laptop(extensions=(extension("ImportError: DLL load failed while importing selective_scan_cuda", glibc=None),)),
        "extensions-load",
        "fail",
    ),
    (linux(extensions=(extension("the process ended with -11"),)), "extensions-load", "fail"),
    (linux(extensions=(extension(glibc=(2, 38)),)), "glibc-for-wheels", "fail"),
    (linux(extensions=(extension(glibc=(2, 34)),)), "glibc-for-wheels", "ok"),
    (linux(system=System("Linux", "5", "x86_64", 8, 64.0, "glibc 2.31")), "glibc-for-wheels", "info"),
    (linux(system=System("Linux", "3.10", "x86_64", 8, 64.0, "glibc 2.17")), "glibc-for-wheels", "warn"),
    (laptop(), "glibc-for-wheels", "absent"),
    (linux(packages=upstream("2.2.2", "1.6.0")), "matching-generations", "fail"),
    (linux(packages=upstream("2.3.0", "1.4.0")), "matching-generations", "fail"),
    (linux(packages=upstream("1.0.1", "1.1.1")), "matching-generations", "fail"),
    (linux(packages=upstream("2.2.2", "1.4.0")), "matching-generations", "absent"),
    (linux(packages=upstream("2.2.5", "1.5.2")), "matching-generations", "absent"),
    (linux(packages=upstream("2.2.2+anymamba.1", "1.6.0+anymamba.1", "port")), "matching-generations", "absent"),
    (machines.cpu_ci(packages=upstream("2.2.2", "1.4.0")), "native-needs-card", "warn"),
    (linux(packages=upstream("2.2.2", "1.4.0")), "native-needs-card", "absent"),
    # Triton
    (linux(triton=Triton("triton", "3.1.0"), driver=card("Tesla T4", (7, 5))), "triton-for-card", "warn"),
    (linux(triton=Triton("triton", "2.1.0"), driver=card("Tesla V100", (7, 0))), "triton-for-card", "warn"),
    (linux(triton=Triton("triton", "3.1.0"), driver=card("RTX 5090", (12, 0))), "triton-for-card", "warn"),
    (linux(triton=Triton("triton", "3.3.1"), driver=card("RTX 5090", (12, 0))), "triton-for-card", "ok"),
    (linux(driver=card("Tesla T4", (7, 5))), "triton-for-card", "absent"),
    (
        laptop(extensions=(extension("ImportError: DLL load failed while importing libtriton", "triton", None),)),
        "triton-loads",
        "warn",
    ),
    (linux(extensions=(extension("ImportError: bad", "triton"),)), "triton-loads", "warn"),
    (
        linux(triton=Triton("triton", "3.1.0"), driver=card("A100", (8, 0)), compilers=Compilers()),
        "triton-toolchain",
        "warn",
    ),
    (linux(triton=Triton("triton", "3.1.0"), driver=card("A100", (8, 0))), "triton-toolchain", "absent"),
    (machines.windows_laptop(), "triton-seen", "info"),
    # the project in the working folder
    (machines.cpu_ci(project=VIM), "fork-expected", "warn"),
    (machines.cpu_ci(project=replace(VIM, vendored=())), "fork-expected", "warn"),
    (machines.cpu_ci(project=VIM_FIRST), "fork-expected", "fail"),
    (machines.cpu_ci(project=replace(VIM_FIRST, missing=())), "fork-expected", "ok"),
    (machines.cpu_ci(project=VMAMBA), "extensions-wanted", "warn"),
    (machines.cpu_ci(project=replace(VMAMBA, missing=())), "extensions-wanted", "absent"),
    (machines.cpu_ci(project=PLAIN), "extensions-wanted", "warn"),
    (machines.cpu_ci(project=PLAIN), "fork-expected", "absent"),
    # the network, on request
    (machines.cpu_ci(), "index-reachable", "info"),
    (machines.cpu_ci(reached=reached()), "index-reachable", "ok"),
    (machines.cpu_ci(reached=reached("gaierror: [Errno -2] Name or service not known")), "index-reachable", "warn"),
    (machines.cpu_ci(reached=reached(REFUSED)), "index-reachable", "warn"),
    (machines.cpu_ci(), "github-reachable", "info"),
    (machines.cpu_ci(reached=reached(github="TimeoutError: timed out")), "github-reachable", "warn"),
    (machines.cpu_ci(wsl=Wsl(2, True, False, linked=False)), "wsl-version", "info"),
    # transformers
    (laptop(packages=Packages((), (Installed("transformers", "4.45.1"),))), "transformers-for-torch", "warn"),
    (laptop(packages=Packages((), (Installed("transformers", "4.36.0"),))), "transformers-for-torch", "absent"),
    (laptop(packages=Packages((), (Installed("transformers", "4.45.1"),))), "transformers-fast-path", "info"),
    # more of compilers
    (machines.windows_laptop(), "sources-as-they-are", "info"),
    (linux(compilers=gcc("13.2.0", "13.0")), "sources-as-they-are", "info"),
    (laptop(compilers=compilers(nvcc=(Nvcc("nvcc", "13.0", "PATH"),))), "sources-as-they-are", "info"),
    (linux(compilers=gcc("13.2.0", "12.8")), "sources-as-they-are", "absent"),
    (laptop(compilers=compilers(nvcc=(CONDAS_NVCC,))), "toolkit-files", "fail"),
    (laptop(compilers=compilers(nvcc=(CONDAS_NVCC, NVCC_124))), "toolkit-files", "warn"),
    (laptop(), "toolkit-files", "absent"),
    (laptop(compilers=compilers(variables=(("VSCMD_ARG_TGT_ARCH", "x64"),))), "vc-environment", "warn"),
    (
        laptop(compilers=compilers(variables=(("VSCMD_ARG_TGT_ARCH", "x64"), ("DISTUTILS_USE_SDK", "1")))),
        "vc-environment",
        "absent",
    ),
    # what can be said in more than one way
    (
        laptop(compilers=compilers(variables=(("CUDA_HOME", "/gone"), ("MAMBA_SKIP_CUDA_BUILD", "TRUE")), nvcc=())),
        "build-variables",
        "warn",
    ),
    (machines.cpu_ci(python=machines.python(environment="store")), "python-environment", "warn"),
    (machines.cpu_ci(python=machines.python(headers=False)), "python-headers", "fail"),
    (laptop(python=machines.python(headers=False)), "python-headers", "fail"),
    (machines.cpu_ci(torch=machines.torch(imports=False, problem="no answer in 60 s")), "torch-imports", "fail"),
    (machines.cpu_ci(torch=machines.torch(imports=False, problem="x: undefined symbol: y")), "torch-imports", "fail"),
    (laptop(torch=machines.torch(imports=False, problem="OSError: [WinError 1114] x")), "torch-imports", "fail"),
    (
        machines.cpu_ci(torch=machines.torch(problem="the process ended early: exit code -11: x")),
        "torch-imports",
        "warn",
    ),
    (
        laptop(compilers=compilers(visual_studio=(VisualStudio("Visual Studio 2022", "17.8", "C:\\VS", ()),))),
        "visual-studio",
        "fail",
    ),
    (
        machines.cpu_ci(torch=machines.cuda_torch(cards=(TorchCard("A100", (8, 0), False, "CUDA error"),))),
        "torch-runs-on-card",
        "fail",
    ),
    (machines.cpu_ci(folders=machines.folders(temporary_free_gb=1.0)), "disk-space", "warn"),
    (
        laptop(torch=machines.cuda_torch(cuda_available=False, cards=()), driver=Driver(on_bus=True, problem="")),
        "torch-cuda-available",
        "fail",
    ),
    (laptop(driver=Driver(on_bus=True, problem="x")), "gpu-seen", "warn"),
    (machines.cpu_ci(operators=(OperatorRun("swiglu", "cpu", None, problem="late"),)), "operators-run", "info"),
    (laptop(windows=replace(machines.windows_laptop().windows, long_paths=True)), "long-paths", "ok"),  # type: ignore[type-var]
    (with_driver("13.0", (6, 1)), "gpu-architecture", "warn"),
    (linux(compilers=gcc("12.2.0", "13.0"), driver=card("GTX 1080", (6, 1))), "nvcc-knows-card", "fail"),
    (machines.cpu_ci(compilers=Compilers()), "host-compiler", "fail"),
]
