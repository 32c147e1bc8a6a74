"""The exact command lines: one for each object, one for the link. What upstream's setup.py and torch would run, and no more.

Left out of upstream's options: `--ptxas-options=-v` and warnings (10 MB of log), `-lineinfo`, `--threads 4` (four times the
memory of a job, for nothing with one architecture).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anymamba.upstream.native.recipe import Recipe
from anymamba.upstream.native.rules import Flags
from anymamba.upstream.native.toolchain import Toolchain, cuda_includes, cuda_libraries
from anymamba.upstream.native.torch_paths import TorchPaths

__all__ = ["Step", "steps"]


@dataclass(frozen=True)
class Step:
    """One program to run.

    Attributes
    ----------
    output : str
        The file that it makes, below the build folder.
    inputs : tuple of str
        The files that it needs, absolute or below the build folder.
    command : tuple of str
    source : str
        The source file's path below the source folder; empty for the link.
    """

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]
    source: str = ""


_NVCC = ("-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math", "-w")
_CL = ("/MD", "/EHsc", "/bigobj", "/wd4819", "/wd4251", "/wd4244", "/wd4267", "/wd4275", "/wd4018", "/wd4190", "/wd4624",
       "/wd4067", "/wd4068")  # fmt: skip


def steps(
    source: Path, recipe: Recipe, chain: Toolchain, torch: TorchPaths, flags: Sequence[Flags], standard: str
) -> list[Step]:
    """Return the compile steps and, last, the link.

    Parameters
    ----------
    source : Path
        Upstream's source folder, absolute.
    recipe : Recipe
    chain : Toolchain
    torch : TorchPaths
    flags : sequence of Flags
        Of the rules that cure by flags.
    standard : str
        "c++17".
    """
    windows = chain.system == "Windows"
    defines = [f"-DTORCH_EXTENSION_NAME={recipe.module}", "-DTORCH_API_INCLUDE_EXTENSION_H", *torch.defines]
    if not windows:
        defines.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.new_abi)}")
    own = list(dict.fromkeys(str(source / Path(path).parent) for path in (*recipe.sources, *recipe.headers)))
    foreign = [*torch.includes, torch.python_include, *cuda_includes(chain, torch.nvidia)]
    system = "-I" if windows else "-isystem"
    includes = [f"-I{folder}" for folder in own]
    includes += [f"-I{folder}" for folder in foreign] if windows else [w for f in foreign for w in (system, f)]
    host_flags = [option for one in flags for option in one.host]
    nvcc_flags = [option for one in flags for option in one.nvcc]
    headers = tuple(str(source / header) for header in recipe.headers)
    found: list[Step] = []
    for path in recipe.sources:
        text = str(source / path)
        output = f"obj/{Path(path).stem}{'.cu' if path.endswith('.cu') else ''}{'.obj' if windows else '.o'}"
        if path.endswith(".cu"):
            command = [*chain.launcher, chain.nvcc, "-c", text, "-o", output, *_NVCC, f"-std={standard}"]
            if windows:
                command += [word for option in _CL if option != "/bigobj" for word in ("-Xcompiler", option)]
                command.append("--use-local-env")
            else:
                command += ["-Xcompiler", "-fPIC", "-ccbin", chain.host]
            command += [*defines, *nvcc_flags, *includes]
        elif windows:
            command = [
                *chain.launcher,
                chain.host,
                "/nologo",
                "/c",
                f"/Fo{output}",
                "/O2",
                f"/std:{standard}",
                *_CL,
                "/w",
            ]
            command += [*defines, *host_flags, *includes, text]
        else:
            command = [*chain.launcher, chain.host, "-c", text, "-o", output, "-O3", "-DNDEBUG", "-fPIC", "-w"]
            command += [f"-std={standard}", *defines, *host_flags, *includes]
        found.append(Step(output, (text, *headers), tuple(command), path))
    objects = tuple(step.output for step in found)
    found.append(_link(recipe.module, objects, chain, torch))
    return found


def _link(module: str, objects: tuple[str, ...], chain: Toolchain, torch: TorchPaths) -> Step:
    output = f"{module}{torch.extension_suffix}"
    libraries = ["c10", "torch", "torch_cpu", "torch_python", "cudart", "c10_cuda", "torch_cuda"]
    folders = [str(Path(torch.folder, "lib")), *cuda_libraries(chain)]
    if chain.system == "Windows":
        command = [chain.linker, "/nologo", "/DLL", f"/OUT:{output}", f"/EXPORT:PyInit_{module}", *objects]
        command += [f"/LIBPATH:{folder}" for folder in (*folders, torch.python_library)]
        command += [f"{library}.lib" for library in libraries]
        # else the linker drops torch_cuda, whose initialisation registers CUDA
        command.append("-INCLUDE:?warp_size@cuda@at@@YAHXZ")
    else:
        command = [chain.linker, "-shared", "-o", output, *objects]
        command += [f"-L{folder}" for folder in folders] + [f"-l{library}" for library in libraries]
    return Step(output, objects, tuple(command))
