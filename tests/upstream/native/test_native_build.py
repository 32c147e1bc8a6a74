"""The whole way with stand-in compilers: plan, sources, edits, objects, wheel; what is missing; what fails and hangs."""

from __future__ import annotations

import dataclasses
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from anymamba.errors import MachineError, OptionError, SourceError
from anymamba.machine import Machine
from anymamba.machine._programs import Answer
from anymamba.machine.compilers import Compilers, Nvcc, Tool, VisualStudio
from anymamba.machine.driver import Card, Driver
from anymamba.machine.folders import Folders
from anymamba.machine.packages import read_packages
from anymamba.machine.python import read_python
from anymamba.machine.system import System
from anymamba.machine.torch_build import Torch
from anymamba.machine.windows import Windows
from anymamba.upstream.native.build import build, check_given
from anymamba.upstream.native.commands import steps
from anymamba.upstream.native.plan import NativePlan, every_architecture, make_native_plan
from anymamba.upstream.native.recipe import Recipe, read_recipe
from anymamba.upstream.native.rules import Flags
from anymamba.upstream.native.run import BuildFailedError, HangError, Snapshot
from anymamba.upstream.native.toolchain import Toolchain, choose_toolchain
from anymamba.upstream.native.torch_paths import TorchPaths

NINJA = shutil.which("ninja") or ""
needs_ninja = pytest.mark.skipif(not NINJA or sys.platform == "win32", reason="needs ninja, and scripts as programs")

SETUP = """\
from torch.utils.cpp_extension import CUDAExtension
ext_modules.append(CUDAExtension(
    name="causal_conv1d_cuda",
    sources=["csrc/causal_conv1d.cpp", "csrc/causal_conv1d_fwd.cu", "csrc/causal_conv1d_bwd.cu"],
    include_dirs=[Path(this_dir) / "csrc"],
))
setup(name="x", install_requires=["torch", "packaging"])
"""
TORCH = TorchPaths(
    folder="/t/torch", version="2.7.0+cu128", cuda="12.8", new_abi=True, standard="c++17",
    defines=('-DPYBIND11_STDLIB="_libstdcpp"',), python_include="/p/include", python_library="/p/libs",
    extension_suffix=".cpython-311-x86_64-linux-gnu.so", tag="cp311-cp311-linux_x86_64", nvidia=("/n/cublas/include",),
)  # fmt: skip


def machine(system: str = "Linux", **changes: object) -> Machine:
    folders = Folders("/h", "/h", None, "/c", True, 99.0, "/tmp", 99.0, "/s", True, "/w")
    found = Machine(
        system=System(name=system, release="6", processor="x86_64", cores=8, memory_gb=64.0, libc="glibc 2.36"),
        python=read_python(),
        torch=Torch("2.7.0+cu128", "/t/torch", "12.8", None, imports=True, cuda_available=True),
        driver=Driver("570.1", "12.8", (Card("A", (8, 6), 24.0), Card("B", (9, 0), 80.0), Card("A", (8, 6), 24.0))),
        triton=None,
        compilers=Compilers(
            nvcc=(Nvcc("/usr/bin/nvcc", "11.5", "PATH"), Nvcc("/opt/12.8/bin/nvcc", "12.8", "default")),
            gcc=Tool("/usr/bin/gcc", "12.2.0"), ninja=Tool(NINJA or "/usr/bin/ninja", "1.11"),
        ),
        windows=None,
        folders=folders,
        packages=read_packages(),
    )  # fmt: skip
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


# --- the plan


def test_of_several_nvccs_the_one_of_torch_s_cuda_is_taken() -> None:
    chain, problems = choose_toolchain(machine(), environ={"PATH": ""})
    assert chain.nvcc == "/opt/12.8/bin/nvcc" and chain.cuda == (12, 8)
    assert not [one for one in problems if one.title == "nvcc and torch"]


def test_everything_that_is_missing_is_named_with_its_fix_before_compiling() -> None:
    bare = machine(
        torch=Torch("2.7.0+cpu", "/t", None, None, imports=True), compilers=Compilers(), driver=Driver(),
    )  # fmt: skip
    plan = make_native_plan({"causal_conv1d": "1.4.0"}, bare, None, environ={"PATH": ""})
    titles = {problem.title for problem in plan.obstacles}
    assert titles >= {"torch for a native build", "nvcc", "C++ compiler", "Ninja", "Card"}
    assert all(problem.fix for problem in plan.obstacles)
    with pytest.raises(MachineError, match="Nothing was compiled") as error:
        plan.check()
    assert "--dry-run" in error.value.next_step
    assert plan.to_json()["problems"]


def test_a_mismatch_of_major_versions_is_an_obstacle() -> None:
    wrong = machine(compilers=Compilers(nvcc=(Nvcc("/n/bin/nvcc", "13.0", "PATH"),), gcc=Tool("gcc", "12.2.0")))
    plan = make_native_plan({"causal_conv1d": "1.4.0"}, wrong, TORCH, environ={"PATH": ""})
    assert "nvcc and torch" in {problem.title for problem in plan.obstacles}


def chain(system: str = "Linux", **changes: object) -> Toolchain:
    found = Toolchain(system, "/n/bin/nvcc", (12, 8), "/n", "/usr/bin/g++", "/usr/bin/g++", NINJA)
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def planned(
    *, arch: str = "native", on: Machine | None = None, tools: Toolchain | None = None, **more: object
) -> NativePlan:
    options = {"arch": arch, "toolchain": (tools or chain(), []), "environ": {}, **more}
    return make_native_plan({"causal_conv1d": "1.4.0"}, on or machine(), TORCH, **options)  # type: ignore[arg-type]


def test_architectures_are_those_of_the_cards_or_of_the_toolkit_or_as_named() -> None:
    assert planned().target.architectures == ("8.6", "9.0")
    assert planned(arch="8.9").target.architectures == ("8.9",)
    assert every_architecture((11, 8)) == ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0+PTX")
    assert every_architecture((13, 0)) == ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")
    with pytest.raises(OptionError):
        planned(arch="hopper")


def test_jobs_are_asked_for_or_set_or_what_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Memory:
        available = 9 << 30

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert planned().jobs == 2 and "GiB" in planned().why_jobs
    assert planned(environ={"MAX_JOBS": "5"}).jobs == 5 and planned(jobs=3).jobs == 3


def test_the_same_wish_has_the_same_folder_and_another_one_another() -> None:
    assert planned().packages[0].folder == planned().packages[0].folder
    assert len({planned(arch=arch).packages[0].folder for arch in ("8.6", "8.9")}) == 2


def test_a_deep_cache_on_windows_without_long_paths_is_an_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / ("x" * 160)))
    on = machine("Windows", windows=Windows("10.0", False, 936, 936))
    tools = chain("Windows", msc_version=1944)
    assert "Path length" in {problem.title for problem in planned(on=on, tools=tools).obstacles}


# --- Windows' compilers, on facts


def test_a_visual_studio_that_cuda_takes_is_chosen_and_its_environment_captured() -> None:
    asked: list[list[str]] = []

    def ask(command: list[str]) -> Answer:
        asked.append(command)
        return Answer(0, "INCLUDE=C:\\inc\nLIB=C:\\lib\nPath=C:\\bin\n=C:=C:\\\n", "")

    studio = VisualStudio("VS 2022", "17.14", r"C:\VS", ("14.44.35207", "14.38.33130"))
    on = machine(
        "Windows",
        compilers=Compilers(nvcc=(Nvcc(r"C:\cuda\bin\nvcc.exe", "11.8", "CUDA_PATH"),), visual_studio=(studio,)),
    )
    found, _ = choose_toolchain(on, environ={"PATH": ""}, ask=ask)  # type: ignore[arg-type]
    assert found.msc_version == 1938 and "14.38.33130" in found.host
    assert "-vcvars_ver=14.38" in asked[-1]
    assert found.environment["INCLUDE"] == r"C:\inc" and found.environment["VSLANG"] == "1033"


def test_a_developer_prompt_or_a_portable_tree_is_taken_as_it_is() -> None:
    on = machine("Windows", compilers=Compilers(cl_on_path=r"C:\m\cl.exe"))
    environ = {"PATH": "", "INCLUDE": "i", "LIB": "l"}
    answer = Answer(0, "", "Microsoft (R) C/C++ Optimizing Compiler Version 19.44.35207 for x64")
    found, problems = choose_toolchain(on, environ=environ, ask=lambda _: answer)
    assert found.msc_version == 1944 and found.environment["INCLUDE"] == "i"
    assert "Visual Studio C++" not in {problem.title for problem in problems}


def test_the_command_lines_of_windows() -> None:
    recipe = Recipe("causal_conv1d_cuda", ("csrc/a.cpp", "csrc/b.cu"), ("csrc/a.h",))
    tools = chain("Windows", host=r"C:\cl.exe", linker=r"C:\link.exe")
    torch = dataclasses.replace(TORCH, extension_suffix=".cp311-win_amd64.pyd", defines=())
    cpp, cu, link = steps(
        Path("/s"),
        recipe,
        tools,
        torch,
        [Flags(host=("/permissive-",), nvcc=("-Xcompiler", "/Zc:preprocessor"))],
        "c++17",
    )
    assert cpp.command[0] == r"C:\cl.exe" and {"/std:c++17", "/MD", "/permissive-", "/Foobj/a.obj"} <= set(cpp.command)
    assert {"/Zc:preprocessor", "--use-local-env", "-std=c++17"} <= set(cu.command) and "-fPIC" not in cu.command
    assert {
        "/EXPORT:PyInit_causal_conv1d_cuda",
        "torch_cuda.lib",
        "/OUT:causal_conv1d_cuda.cp311-win_amd64.pyd",
    } <= set(link.command)
    assert link.inputs == ("obj/a.obj", "obj/b.cu.obj") and cu.inputs[1].endswith("a.h")


def test_the_command_lines_of_linux() -> None:
    recipe = Recipe("causal_conv1d_cuda", ("csrc/a.cpp", "csrc/b.cu"), ())
    cpp, cu, link = steps(Path("/s"), recipe, chain(launcher=("/usr/bin/ccache",)), TORCH, [], "c++17")
    assert cpp.command[:2] == ("/usr/bin/ccache", "/usr/bin/g++") and cu.command[:2] == (
        "/usr/bin/ccache",
        "/n/bin/nvcc",
    )
    assert "-D_GLIBCXX_USE_CXX11_ABI=1" in cpp.command and '-DPYBIND11_STDLIB="_libstdcpp"' in cu.command
    assert ("-isystem", "/n/cublas/include") in zip(cpp.command, cpp.command[1:])
    assert "-ltorch_cuda" in link.command and link.output == "causal_conv1d_cuda.cpython-311-x86_64-linux-gnu.so"


# --- recipes


def test_a_recipe_is_read_without_running_setup_py_and_missing_files_are_named(tmp_path: Path) -> None:
    source = tree(tmp_path / "s", {})
    (source / "setup.py").write_text("raise SystemExit\n" + SETUP, encoding="utf-8")
    recipe = read_recipe(source, "causal_conv1d")
    assert recipe.module == "causal_conv1d_cuda" and len(recipe.sources) == 3
    assert recipe.headers == ("csrc/static_switch.h",) and recipe.requirements == ("torch", "packaging")
    (source / "csrc" / "causal_conv1d.cpp").unlink()
    with pytest.raises(SourceError, match=r"causal_conv1d\.cpp is missing"):
        read_recipe(source, "causal_conv1d")


def tree(folder: Path, texts: dict[str, str]) -> Path:
    """Sources of causal_conv1d 1.4.0's shape; texts for the files that have something to say."""
    (folder / "csrc").mkdir(parents=True)
    for name in ("causal_conv1d.cpp", "causal_conv1d_fwd.cu", "causal_conv1d_bwd.cu", "static_switch.h"):
        (folder / "csrc" / name).write_text(texts.get(name, "// nothing\n"), encoding="utf-8")
    (folder / "causal_conv1d").mkdir()
    (folder / "causal_conv1d" / "__init__.py").write_text('__version__ = "1.4.0"\n', encoding="utf-8")
    (folder / "causal_conv1d" / "causal_conv1d_interface.py").write_text(
        "def causal_conv1d_fn():\n    pass\ndef causal_conv1d_update():\n    pass\n", encoding="utf-8"
    )
    (folder / "setup.py").write_text(SETUP, encoding="utf-8")
    (folder / "LICENSE").write_text("licence\n", encoding="utf-8")
    return folder


# --- the build


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    program = tmp_path / "cc"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("standin.py")}" "$@"\n', encoding="utf-8"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return chain(nvcc=str(program), host=str(program), linker=str(program))


def made(plan: NativePlan, source: Path, into: Path, **options: object) -> list[Path]:
    options = {"hang_seconds": 60, "poll_seconds": 0.1, **options}
    return [one.wheel for one in build(plan, into, python=Path(sys.executable), given=source, **options)]  # type: ignore[arg-type]


@needs_ninja
def test_from_sources_to_a_wheel(tmp_path: Path, tools: Toolchain) -> None:
    seen: list[Snapshot] = []
    source = tree(tmp_path / "s", {})
    plan = planned(tools=tools)
    (wheel,) = made(plan, source, tmp_path / "out", report=seen.append)
    assert wheel.name == "causal_conv1d-1.4.0+native.cu128.torch2.7-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as zipped:
        names = set(zipped.namelist())
        info = "causal_conv1d-1.4.0+native.cu128.torch2.7.dist-info"
        assert "causal_conv1d_cuda.cpython-311-x86_64-linux-gnu.so" in names and "causal_conv1d/__init__.py" in names
        assert "causal_conv1d_cuda.py" not in names
        words = zipped.read(f"{info}/WHEEL").decode()
        assert "Root-Is-Purelib: false" in words and "Tag: cp311-cp311-linux_x86_64" in words
        assert "Version: 1.4.0+native" in zipped.read(f"{info}/METADATA").decode()
        assert '"architectures"' in zipped.read(f"{info}/anymamba-provenance.json").decode()
        assert "anymamba.ops" not in zipped.read("causal_conv1d/causal_conv1d_interface.py").decode()
    assert not Path(plan.packages[0].folder).exists()
    logs = list((tmp_path / "cache" / "native" / "logs").glob("causal_conv1d-1.4.0-*.log"))
    assert len(logs) == 1 and "rule architectures: flags" in logs[0].read_text(encoding="utf-8")


@needs_ninja
def test_a_failure_is_explained_and_the_next_run_goes_on(tmp_path: Path, tools: Toolchain) -> None:
    says = '// standin: say x.cu(1): error: identifier "M_LOG2E" is undefined\n// standin: fail\n'
    source = tree(tmp_path / "s", {"causal_conv1d_bwd.cu": says})
    plan = planned(tools=tools, jobs=1)
    with pytest.raises(BuildFailedError, match="M_LOG2E") as error:
        made(plan, source, tmp_path / "out")
    assert error.value.log is not None and error.value.log.is_file() and "--resume" in error.value.next_step
    folder = Path(plan.packages[0].folder)
    before = {path: path.read_text(encoding="utf-8") for path in folder.glob("obj/*.runs")}
    (folder / "source" / "csrc" / "causal_conv1d_bwd.cu").write_text("// cured\n", encoding="utf-8")
    assert made(plan, source, tmp_path / "out", resume=True, keep=True)
    after = {path: path.read_text(encoding="utf-8") for path in folder.glob("obj/*.runs")}
    assert [path.name for path in before if before[path] != after[path]] == ["causal_conv1d_bwd.cu.o.runs"]


@needs_ninja
def test_an_error_that_nobody_knows_says_where_the_log_is(tmp_path: Path, tools: Toolchain) -> None:
    source = tree(
        tmp_path / "s", {"causal_conv1d_bwd.cu": "// standin: say a.cu(1): error: the moon\n// standin: fail\n"}
    )
    with pytest.raises(BuildFailedError, match="the moon") as error:
        made(planned(tools=tools, jobs=1), source, tmp_path / "out")
    assert "anymamba explain" in error.value.next_step


@needs_ninja
def test_a_compiler_that_hangs_once_is_tried_again_alone(tmp_path: Path, tools: Toolchain) -> None:
    source = tree(tmp_path / "s", {"causal_conv1d_fwd.cu": "// standin: hang 1\n"})
    assert made(planned(tools=tools), source, tmp_path / "out", hang_seconds=2)
    (log,) = (tmp_path / "cache" / "native" / "logs").glob("*.log")
    assert "hung: " in log.read_text(encoding="utf-8") and "causal_conv1d_fwd.cu" in log.read_text(encoding="utf-8")


@needs_ninja
def test_a_compiler_that_hangs_again_is_named(tmp_path: Path, tools: Toolchain) -> None:
    source = tree(tmp_path / "s", {"causal_conv1d_fwd.cu": "// standin: hang 9\n"})
    with pytest.raises(HangError, match=r"hung on csrc/causal_conv1d_fwd\.cu") as error:
        made(planned(tools=tools), source, tmp_path / "out", hang_seconds=1.5)
    assert "--resume --jobs 1" in error.value.next_step


@needs_ninja
def test_memory_that_ran_out_is_recognised_and_fewer_are_tried(tmp_path: Path, tools: Toolchain) -> None:
    source = tree(tmp_path / "s", {"causal_conv1d_fwd.cu": "// standin: killed 1\n"})
    assert made(planned(tools=tools, jobs=4), source, tmp_path / "one")
    other = tree(tmp_path / "t", {"causal_conv1d_fwd.cu": "// standin: killed 9\n"})
    with pytest.raises(BuildFailedError, match="memory"):
        made(planned(tools=tools, jobs=2), other, tmp_path / "two")


def test_one_folder_of_sources_is_of_one_package() -> None:
    plan = make_native_plan(
        {"causal_conv1d": "1.4.0", "mamba_ssm": "2.2.2"}, machine(), TORCH, toolchain=(chain(), []), environ={}
    )
    with pytest.raises(OptionError, match="--source"):
        check_given(plan, Path("s"))
