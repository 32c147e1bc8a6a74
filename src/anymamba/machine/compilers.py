"""Compilers: Visual Studio with its toolsets and Windows SDKs, nvcc wherever it hides, gcc, clang, ninja, git.

Several nvccs are normal (system toolkit, conda's, a module). All are listed in the order in which a torch extension build
would take them, because the first one wins there and it is often the wrong one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anymamba.machine._programs import Ask, ask

__all__ = ["Compilers", "Nvcc", "Tool", "VisualStudio", "read_compilers", "toolkit_root"]


@dataclass(frozen=True)
class Tool:
    """A program and its version."""

    path: str
    version: str


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler; `found_by` is how an extension build would find it: CUDA_HOME, CUDA_PATH, PATH, conda, default."""

    path: str
    version: str  # "11.8"; empty when it did not answer
    found_by: str
    missing: tuple[str, ...] = ()  # of the toolkit's files that an extension needs, those that are not beside it

    @property
    def release(self) -> tuple[int, int] | None:
        """(11, 8)."""
        parts = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(parts.group(1)), int(parts.group(2))) if parts else None


@dataclass(frozen=True)
class VisualStudio:
    """An installed Visual Studio or Build Tools. No toolset: the C++ workload is not installed."""

    name: str
    version: str  # "17.14.36119.2"
    path: str
    toolsets: tuple[str, ...]  # "14.44.35207", newest first

    @property
    def msc_version(self) -> int | None:
        """_MSC_VER of the newest toolset: 14.44 is 1944."""
        if not self.toolsets:
            return None
        return 1900 + int(self.toolsets[0].split(".")[1])


@dataclass(frozen=True)
class Compilers:
    """All compilers of this machine."""

    nvcc: tuple[Nvcc, ...] = ()
    visual_studio: tuple[VisualStudio, ...] = ()
    windows_sdk: tuple[str, ...] = ()  # newest first
    cl_on_path: str | None = None
    gcc: Tool | None = None
    clang: Tool | None = None
    ninja: Tool | None = None
    git: Tool | None = None
    variables: tuple[tuple[str, str], ...] = ()  # those set, of the ones that builds look at


_VARIABLES = (
    "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "DISTUTILS_USE_SDK", "CC", "CXX",
    "VSCMD_ARG_TGT_ARCH",
    "MAMBA_FORCE_BUILD", "CAUSAL_CONV1D_FORCE_BUILD", "MAMBA_SKIP_CUDA_BUILD", "CAUSAL_CONV1D_SKIP_CUDA_BUILD",
)  # fmt: skip


def read_compilers(
    *, environ: Mapping[str, str] = os.environ, ask: Ask = ask, windows: bool = sys.platform == "win32"
) -> Compilers:
    """Find the compilers; each is asked for its version."""
    return Compilers(
        nvcc=_nvccs(environ, ask, windows),
        visual_studio=_visual_studios(environ, ask) if windows else (),
        windows_sdk=_windows_sdks(environ) if windows else (),
        cl_on_path=_which("cl", environ) if windows else None,
        gcc=_tool("gcc", ask, environ),
        clang=_tool("clang", ask, environ),
        ninja=_tool("ninja", ask, environ),
        git=_tool("git", ask, environ),
        variables=tuple((name, environ[name]) for name in _VARIABLES if name in environ),
    )


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    beside = Path(sys.executable).parent  # an environment that was not activated still has its own ninja
    return shutil.which(name, path=environ.get("PATH")) or shutil.which(name, path=str(beside))


def _tool(name: str, ask: Ask, environ: Mapping[str, str]) -> Tool | None:
    path = _which(name, environ)
    if path is None:
        return None
    answer = ask([path, "--version"])
    version = re.search(r"\d+\.\d+(\.\d+)*", answer.out or answer.error)
    # macOS ships stubs that only offer to install the developer tools: a tool that cannot say its version is not there
    return Tool(path, version.group(0)) if answer.ok and version else None


def _nvccs(environ: Mapping[str, str], ask: Ask, windows: bool) -> tuple[Nvcc, ...]:
    name = "nvcc.exe" if windows else "nvcc"
    places: list[tuple[str, Path]] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            places.append((variable, Path(environ[variable], "bin", name)))
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    if on_path:
        places.append(("PATH", Path(on_path)))
    for prefix in dict.fromkeys((environ.get("CONDA_PREFIX", ""), sys.prefix)):
        if prefix:
            places += [("conda", Path(prefix, part, name)) for part in ("bin", "Library/bin")]
    places += [("default", folder / "bin" / name) for folder in _default_toolkits(environ, windows)]
    found: dict[str, Nvcc] = {}
    for found_by, path in places:
        if path.is_file():
            real = str(path.resolve())
            if real not in found:
                found[real] = Nvcc(str(path), _nvcc_version(str(path), ask), found_by, _missing(path, windows))
    return tuple(found.values())


def _default_toolkits(environ: Mapping[str, str], windows: bool) -> list[Path]:
    if windows:
        root = Path(environ.get("ProgramFiles", r"C:\Program Files"), "NVIDIA GPU Computing Toolkit", "CUDA")
        return sorted(root.glob("v*.*"))
    return [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]


def _missing(nvcc: Path, windows: bool) -> tuple[str, ...]:
    """Return what torch's headers and the linker want of the toolkit and is not there (conda's cuda-nvcc comes alone)."""
    # a link or a script (/usr/bin/nvcc, a module's folder) belongs to the toolkit it leads to; a package that spreads
    # itself over /usr keeps its headers in /usr/include, which the compiler finds by itself
    roots = {nvcc.parent.parent, toolkit_root(nvcc), Path("/usr")} if not windows else {nvcc.parent.parent}
    includes = [root / part for root in roots for part in ("include", "targets/x86_64-linux/include")]
    # the packages of NVIDIA's that pip's torch brings: a build takes from them what the toolkit lacks
    includes += [folder for place in sys.path for folder in sorted(Path(place).glob("nvidia/*/include"))]
    wanted = ("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h")
    missing = [name for name in wanted if not any((folder / name).is_file() for folder in includes)]
    if windows and not any((root / "lib" / "x64" / "cudart.lib").is_file() for root in roots):
        missing += ["cudart.lib"] if not any((root / "lib" / "cudart.lib").is_file() for root in roots) else []
    return tuple(missing)


def toolkit_root(nvcc: Path) -> Path:
    """Return the folder of the toolkit that an nvcc belongs to, through links and through a script that starts the real one."""
    path = nvcc
    if path.is_file() and path.stat().st_size < 4096:  # nvcc itself has megabytes
        for word in path.read_text(encoding="utf-8", errors="replace").split():
            if word.strip("\"'").endswith("/bin/nvcc") and Path(word.strip("\"'")).is_file():
                path = Path(word.strip("\"'"))
    return path.resolve().parent.parent


def _nvcc_version(path: str, ask: Ask) -> str:
    answer = ask([path, "--version"])
    release = re.search(r"release (\d+\.\d+)", answer.out)
    return release.group(1) if release else ""


def _visual_studios(environ: Mapping[str, str], ask: Ask) -> tuple[VisualStudio, ...]:
    root = environ.get("ProgramFiles(x86)", r"C:\Program Files (x86)")
    vswhere = Path(root, "Microsoft Visual Studio", "Installer", "vswhere.exe")
    found: dict[str, VisualStudio] = {}
    if vswhere.is_file():
        answer = ask([str(vswhere), "-products", "*", "-all", "-prerelease", "-format", "json", "-utf8"])
        for instance in _json_list(answer.out):
            path = str(instance.get("installationPath", ""))
            version = str(instance.get("installationVersion", ""))
            found[path.lower()] = VisualStudio(
                str(instance.get("displayName", "Visual Studio")), version, path, _toolsets(Path(path))
            )
    for version, path in _registry_values(r"SOFTWARE\Microsoft\VisualStudio\SxS\VS7"):
        path = path.rstrip("\\")
        if path.lower() not in found:
            found[path.lower()] = VisualStudio(f"Visual Studio {version}", version, path, _toolsets(Path(path)))
    return tuple(sorted(found.values(), key=lambda one: _numbers(one.version), reverse=True))


def _toolsets(studio: Path) -> tuple[str, ...]:
    folders = (studio / "VC" / "Tools" / "MSVC").glob("*")
    usable = [folder.name for folder in folders if (folder / "bin" / "Hostx64" / "x64" / "cl.exe").is_file()]
    return tuple(sorted(usable, key=_numbers, reverse=True))


def _windows_sdks(environ: Mapping[str, str]) -> tuple[str, ...]:
    roots = [
        path
        for name, path in _registry_values(r"SOFTWARE\Microsoft\Windows Kits\Installed Roots")
        if name == "KitsRoot10"
    ]
    roots.append(str(Path(environ.get("ProgramFiles(x86)", r"C:\Program Files (x86)"), "Windows Kits", "10")))
    versions = {
        folder.name
        for root in roots
        for folder in Path(root, "Include").glob("10.*")
        if (folder / "um" / "windows.h").is_file()
    }
    return tuple(sorted(versions, key=_numbers, reverse=True))


def _registry_values(key: str) -> list[tuple[str, str]]:
    """Return name and text of every value of `key` under HKEY_LOCAL_MACHINE, in both registry views."""
    try:
        import winreg as registry_module
    except ImportError:
        return []
    registry: Any = registry_module
    values: list[tuple[str, str]] = []
    for view in (registry.KEY_WOW64_64KEY, registry.KEY_WOW64_32KEY):
        try:
            with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, key, 0, registry.KEY_READ | view) as opened:
                for index in range(registry.QueryInfoKey(opened)[1]):
                    name, value, _ = registry.EnumValue(opened, index)
                    values.append((name, str(value)))
        except OSError:
            continue
    return values


def _json_list(text: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(text or "[]")
    except ValueError:
        return []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
