"""Can upstream's C++ and CUDA sources be compiled here? Nothing in this file matters for the port.

The limits are the tools' own: CUDA's host_config.h for Visual Studio and gcc, nvcc's list of architectures.
"""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.doctor.torch_index import install_command
from anymamba.machine import Machine

# (first CUDA release, first _MSC_VER it refuses); measured with the headers of 11.8, 12.9 and 13.5
MSC_LIMITS = (((13, 0), 1960), ((12, 4), 1950), ((0, 0), 1940))
# (first CUDA release, newest gcc it takes)
_GCC_LIMITS = (((13, 0), 15), ((12, 8), 14), ((12, 4), 13), ((12, 0), 12), ((11, 5), 11), ((0, 0), 10))
_OLDEST_GCC = 9  # C++17 as torch 2.1's headers need it
# (architecture, CUDA release that learnt it)
_LEARNT = (((10, 0), (12, 8)), ((8, 9), (11, 8)), ((8, 6), (11, 1)), ((8, 0), (11, 0)))

_BUILD_TOOLS = (
    'winget install Microsoft.VisualStudio.2022.BuildTools --override "--passive --wait '
    '--add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'
)


def cuda_torch(machine: Machine) -> Result | None:
    """Native extensions are CUDA extensions: the torch they are built against must be a CUDA build."""
    torch = machine.torch
    if torch is None or torch.cuda or torch.hip:
        return None
    return Result(
        "cuda-torch",
        "torch for a native build",
        Status.FAIL,
        Way.NATIVE,
        seen=f"{torch.version} (CPU only)",
        wanted="a CUDA build of torch",
        why="upstream's setup.py stops with InvalidVersion or TypeError on a CPU build",
        fix=install_command(machine, again=True)
        if machine.driver.cards or machine.driver.on_bus
        else "anymamba install    (the port needs none)",
    )


def visual_studio(machine: Machine) -> Result | None:
    """Visual Studio 2019 or newer with the C++ workload."""
    if machine.system.name != "Windows":
        return None
    studios = machine.compilers.visual_studio
    usable = [studio for studio in studios if studio.toolsets]
    if usable:
        best = usable[0]
        return Result(
            "visual-studio",
            "Visual Studio C++",
            Status.OK,
            Way.NATIVE,
            seen=f"{best.name} {best.version}, toolset {best.toolsets[0]}",
            wanted="2019 or 2022 with C++",
        )
    return Result(
        "visual-studio",
        "Visual Studio C++",
        Status.FAIL,
        Way.NATIVE,
        seen=f"{studios[0].name} without the C++ workload" if studios else "not installed",
        wanted='2022 with "Desktop development with C++"',
        why="cl.exe compiles the extensions",
        fix=_BUILD_TOOLS,
    )


def windows_sdk(machine: Machine) -> Result | None:
    """windows.h and its libraries."""
    if machine.system.name != "Windows":
        return None
    sdks = machine.compilers.windows_sdk
    return Result(
        "windows-sdk",
        "Windows SDK",
        Status.OK if sdks else Status.FAIL,
        Way.NATIVE,
        seen=sdks[0] if sdks else "not installed",
        wanted="10.0 or newer",
        why="" if sdks else "cl.exe finds neither its C headers nor kernel32.lib without it",
        fix="" if sdks else _BUILD_TOOLS,
    )


def host_compiler(machine: Machine) -> Result | None:
    """Gcc or clang on Linux and macOS, neither too old for torch nor too new for CUDA."""
    if machine.system.name == "Windows":
        return None
    compiler = machine.compilers.gcc or machine.compilers.clang
    if compiler is None:
        return Result(
            "host-compiler",
            "C++ compiler",
            Status.FAIL,
            Way.NATIVE,
            seen="neither gcc nor clang",
            wanted=f"gcc {_OLDEST_GCC} or newer",
            why="it compiles the extensions",
            fix=for_system(machine, windows="", linux="sudo apt install g++", mac="xcode-select --install"),
        )
    name = "gcc" if machine.compilers.gcc else "clang"
    result = Result(
        "host-compiler",
        "C++ compiler",
        Status.OK,
        Way.NATIVE,
        f"{name} {compiler.version}",
        f"gcc {_OLDEST_GCC} or newer",
    )
    if name == "clang":
        return result
    major = int(compiler.version.split(".")[0])
    release = machine.compilers.nvcc[0].release if machine.compilers.nvcc else None
    newest = next(limit for start, limit in _GCC_LIMITS if (release or (99, 0)) >= start)
    if major < _OLDEST_GCC:
        why, wanted = "torch's headers are C++17", f"gcc {_OLDEST_GCC} or newer"
        fix = f"sudo apt install g++-{max(_OLDEST_GCC, min(newest, 11))}"
    elif release is not None and major > newest:
        why, wanted = f"CUDA {release[0]}.{release[1]} refuses gcc newer than {newest}", f"gcc up to {newest}"
        fix = f"sudo apt install g++-{newest} && export CC=gcc-{newest} CXX=g++-{newest}"
    else:
        return result
    return Result(result.id, result.title, Status.FAIL, Way.NATIVE, result.seen, wanted, why, fix)


def nvcc_found(machine: Machine) -> Result:
    """The CUDA compiler that an extension build would take."""
    found = machine.compilers.nvcc
    if found:
        others = f"; also {', '.join(f'{one.version} by {one.found_by}' for one in found[1:])}" if found[1:] else ""
        return Result(
            "nvcc-found",
            "nvcc",
            Status.OK if found[0].version else Status.FAIL,
            Way.NATIVE,
            seen=f"{found[0].version or 'does not answer'} by {found[0].found_by}: {found[0].path}{others}",
            wanted="the CUDA version torch was built with",
        )
    toolkit = (machine.torch and machine.torch.cuda) or "11.8"
    return Result(
        "nvcc-found",
        "nvcc",
        Status.FAIL,
        Way.NATIVE,
        seen="not found (CUDA_HOME, CUDA_PATH, PATH, conda, usual folders)",
        wanted=f"CUDA {toolkit}",
        why="it compiles the kernels; setup.py without it: \"name 'bare_metal_version' is not defined\"",
        fix=f"conda install -c nvidia/label/cuda-{_three_parts(toolkit)} cuda-toolkit",
    )


def nvcc_matches_torch(machine: Machine) -> Result | None:
    """Same major CUDA version, or torch's extension builder refuses."""
    torch, found = machine.torch, machine.compilers.nvcc
    if torch is None or not torch.cuda or not found or found[0].release is None:
        return None
    wanted = torch.cuda
    nvcc = found[0]
    if nvcc.version == wanted:
        return Result(
            "nvcc-matches-torch", "nvcc and torch", Status.OK, Way.NATIVE, f"both CUDA {wanted}", "the same CUDA"
        )
    same_major = nvcc.version.split(".")[0] == wanted.split(".")[0]
    better = next((one for one in found[1:] if one.version == wanted), None)
    home = better.path.replace("\\", "/").rsplit("/", 2)[0] if better else ""
    return Result(
        "nvcc-matches-torch",
        "nvcc and torch",
        Status.WARN if same_major else Status.FAIL,
        Way.NATIVE,
        seen=f"nvcc {nvcc.version} ({nvcc.found_by}), torch built with {wanted}",
        wanted="the same CUDA",
        why="torch warns" if same_major else 'torch refuses: "The detected CUDA version mismatches the version"',
        fix=for_system(machine, windows=f'set "CUDA_HOME={home}"', linux=f"export CUDA_HOME='{home}'")
        if better
        else f"conda install -c nvidia/label/cuda-{_three_parts(wanted)} cuda-toolkit",
    )


def studio_for_cuda(machine: Machine) -> Result | None:
    """CUDA refuses a Visual Studio newer than itself (error C1189)."""
    studios = [studio for studio in machine.compilers.visual_studio if studio.msc_version is not None]
    nvcc = machine.compilers.nvcc[0] if machine.compilers.nvcc else None
    if not studios or nvcc is None or nvcc.release is None:
        return None
    release = nvcc.release
    limit = next(limit for start, limit in MSC_LIMITS if release >= start)
    fitting = [
        toolset for studio in studios for toolset in studio.toolsets if 1900 + int(toolset.split(".")[1]) < limit
    ]
    newest = studios[0].msc_version or 0
    if newest < limit:
        return Result(
            "studio-for-cuda", "Visual Studio for CUDA", Status.OK, Way.NATIVE, f"_MSC_VER {newest}", f"below {limit}"
        )
    choose = (
        f'"{studios[0].path}\\VC\\Auxiliary\\Build\\vcvarsall.bat" x64 -vcvars_ver={_two_parts(fitting[0])}'
        if fitting
        else ""
    )
    return Result(
        "studio-for-cuda",
        "Visual Studio for CUDA",
        Status.WARN if fitting else Status.FAIL,
        Way.NATIVE,
        seen=f"_MSC_VER {newest} with CUDA {nvcc.version}",
        wanted=f"below {limit}",
        why='CUDA stops with C1189 "unsupported Microsoft Visual Studio version" (or STL1002 when told to go on)',
        fix=choose
        or 'add the component "MSVC v143 - VS 2022 C++ x64/x86 build tools (v14.38-17.8)" in the Visual Studio Installer',
    )


def nvcc_knows_card(machine: Machine) -> Result | None:
    """Each architecture needs an nvcc that learnt it, and CUDA 13 forgot the old ones."""
    nvcc = machine.compilers.nvcc[0] if machine.compilers.nvcc else None
    if nvcc is None or nvcc.release is None:
        return None
    for card in machine.driver.cards:
        if card.capability is None:
            continue
        capability = card.capability
        needed = next((release for architecture, release in _LEARNT if capability >= architecture), (0, 0))
        if nvcc.release < needed:
            wanted = f"CUDA {needed[0]}.{needed[1]} or newer"
        elif nvcc.release >= (13, 0) and capability < (7, 5):
            wanted = "CUDA 12.9 or older"
        else:
            continue
        return Result(
            "nvcc-knows-card",
            "nvcc for this card",
            Status.FAIL,
            Way.NATIVE,
            seen=f"nvcc {nvcc.version}, {card.name} ({card.architecture})",
            wanted=wanted,
            why='nvcc cannot make code for it: "Unsupported gpu architecture", later "no kernel image is available"',
            fix="install that toolkit and point CUDA_HOME at it; or: anymamba install",
        )
    return None


def ninja_found(machine: Machine) -> Result:
    """Ninja, or torch falls back to compiling one file after another."""
    ninja = machine.compilers.ninja
    return Result(
        "ninja-found",
        "Ninja",
        Status.OK if ninja else Status.WARN,
        Way.NATIVE,
        seen=ninja.version if ninja else "not found",
        wanted="any",
        why="" if ninja else "without it torch compiles one file after another",
        fix="" if ninja else "python -m pip install ninja",
    )


def build_memory(machine: Machine) -> Result | None:
    """Each nvcc of these sources takes about 3 GB; too many at once look like a hang."""
    memory, cores = machine.system.memory_gb, machine.system.cores
    jobs = max(1, int(memory // 3))
    if memory == 0 or jobs >= cores or any(name == "MAX_JOBS" for name, _ in machine.compilers.variables):
        return None
    return Result(
        "build-memory",
        "Memory for the build",
        Status.WARN,
        Way.NATIVE,
        seen=f"{memory:g} GB for {cores} compilers at once",
        wanted="about 3 GB each",
        why="a build that swaps looks as if it hung",
        fix=for_system(machine, windows=f"set MAX_JOBS={jobs}", linux=f"export MAX_JOBS={jobs}"),
    )


def build_variables(machine: Machine) -> Result | None:
    """Variables of upstream's setup.py that are set to something it does not read, or that switch CUDA off."""
    trouble = []
    for name, value in machine.compilers.variables:
        if name.endswith("_FORCE_BUILD") and value != "TRUE":
            trouble.append(f"{name}={value} (only TRUE counts)")
        if name.endswith("_SKIP_CUDA_BUILD") and value == "TRUE":
            trouble.append(f"{name}=TRUE (makes a wheel that cannot be imported)")
    homes = [(name, value) for name, value in machine.compilers.variables if name in ("CUDA_HOME", "CUDA_PATH")]
    found_by = {one.found_by for one in machine.compilers.nvcc}
    if homes and homes[0][0] not in found_by and not ({"CUDA_HOME", "CUDA_PATH"} & found_by):
        trouble.append(f"{homes[0][0]}={homes[0][1]} (no nvcc there)")
    if not trouble:
        return None
    names = [entry.split("=")[0] for entry in trouble]
    return Result(
        "build-variables",
        "Build variables",
        Status.WARN,
        Way.NATIVE,
        seen="; ".join(trouble),
        wanted="unset, or right",
        why="upstream's setup.py compares with exactly TRUE and believes CUDA_HOME",
        fix=for_system(machine, windows=" & ".join(f"set {name}=" for name in names), linux=f"unset {' '.join(names)}"),
    )


def _three_parts(cuda: str) -> str:
    return cuda if cuda.count(".") == 2 else f"{cuda}.0"


def _two_parts(toolset: str) -> str:
    return ".".join(toolset.split(".")[:2])


def toolkit_files(machine: Machine) -> Result | None:
    """Headers and import libraries of the toolkit beside the nvcc that a build would take."""
    nvcc = machine.compilers.nvcc[0] if machine.compilers.nvcc else None
    if nvcc is None or not nvcc.missing:
        return None
    whole = next((one for one in machine.compilers.nvcc if not one.missing), None)
    if whole is not None:
        home = whole.path.replace("\\", "/").rsplit("/", 2)[0]
        return Result(
            "toolkit-files",
            "CUDA toolkit",
            Status.WARN,
            Way.NATIVE,
            seen=f"nvcc without {', '.join(nvcc.missing)}",
            wanted="the toolkit's headers and libraries",
            why="the toolkit's headers are not beside the nvcc that is found first, but beside another",
            fix=for_system(machine, windows=f'set "CUDA_HOME={home}"', linux=f"export CUDA_HOME='{home}'"),
        )
    return Result(
        "toolkit-files",
        "CUDA toolkit",
        Status.FAIL,
        Way.NATIVE,
        seen=f"nvcc without {', '.join(nvcc.missing)}",
        wanted="the toolkit's headers and libraries",
        why="torch's headers include them; conda's cuda-nvcc comes without",
        fix=f"conda install -c nvidia/label/cuda-{_three_parts(nvcc.version or '11.8')} cuda-libraries-dev cuda-cudart-dev",
    )


def vc_environment(machine: Machine) -> Result | None:
    """In a terminal where vcvars was called, torch's builder wants to be told so."""
    variables = dict(machine.compilers.variables)
    if "VSCMD_ARG_TGT_ARCH" not in variables or "DISTUTILS_USE_SDK" in variables:
        return None
    return Result(
        "vc-environment",
        "Visual C++ terminal",
        Status.WARN,
        Way.NATIVE,
        seen=f"active for {variables['VSCMD_ARG_TGT_ARCH']}, DISTUTILS_USE_SDK not set",
        wanted="DISTUTILS_USE_SDK=1",
        why='torch\'s builder stops: "VC environment is activated but DISTUTILS_USE_SDK is not set"',
        fix="set DISTUTILS_USE_SDK=1",
    )


def sources_as_they_are(machine: Machine) -> Result | None:
    """Upstream's sources want mending for MSVC and for CUDA 13; our builds do it, a plain pip does not."""
    nvcc = machine.compilers.nvcc[0] if machine.compilers.nvcc else None
    thirteen = nvcc is not None and nvcc.release is not None and nvcc.release >= (13, 0)
    who = [name for name, so in (("cl.exe", machine.system.name == "Windows"), ("CUDA 13", thirteen)) if so]
    if not who:
        return None
    return Result(
        "sources-as-they-are",
        "Upstream's sources",
        Status.INFO,
        Way.NATIVE,
        seen=f"{' and '.join(who)} cannot compile them as they are; `anymamba build` mends them, `pip install` does not",
        wanted="mended sources",
    )
