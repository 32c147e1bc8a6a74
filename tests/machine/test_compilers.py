"""Compilers are found where extension builds look for them, in the same order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from anymamba.machine import compilers as compilers_module
from anymamba.machine._programs import Answer
from anymamba.machine.compilers import VisualStudio, read_compilers

# Microsoft's own answer, shortened to what is read
VSWHERE = [{"displayName": "Visual Studio Build Tools 2022", "installationVersion": "17.14.36119.2"}]


def nvcc_says(release: str) -> str:
    return (
        "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2022 NVIDIA Corporation\n"
        f"Built on Wed_Sep_21_10:41:10_Pacific_Daylight_Time_2022\nCuda compilation tools, release {release}, V{release}.89\n"
    )


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _only_what_the_test_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers_module, "_default_toolkits", lambda environ, windows: [])
    monkeypatch.setattr(compilers_module.sys, "prefix", "/nowhere")
    monkeypatch.setattr(compilers_module.sys, "executable", "/nowhere/python")


def test_an_empty_machine_has_no_compiler() -> None:
    found = read_compilers(environ={"PATH": "/nowhere"}, ask=lambda command: Answer(None, "", ""), windows=False)
    assert found == compilers_module.Compilers()


def test_nvccs_are_listed_in_the_order_in_which_a_build_takes_them(tmp_path: Path) -> None:
    name = "nvcc.exe" if os.name == "nt" else "nvcc"
    home = program(tmp_path / "home" / "bin", name)
    path = program(tmp_path / "path", name)
    conda = program(tmp_path / "conda" / "bin", name)
    releases = {str(home): "11.8", str(path): "12.4", str(conda): "13.0"}

    def ask(command: Sequence[str]) -> Answer:
        return Answer(0, nvcc_says(releases[command[0]]), "") if command[0] in releases else Answer(None, "", "")

    environ = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(path.parent), "CONDA_PREFIX": str(tmp_path / "conda")}
    found = read_compilers(environ=environ, ask=ask, windows=os.name == "nt")
    assert [(one.found_by, one.version) for one in found.nvcc] == [
        ("CUDA_HOME", "11.8"),
        ("PATH", "12.4"),
        ("conda", "13.0"),
    ]
    assert found.nvcc[0].release == (11, 8)
    assert found.variables == (("CUDA_HOME", str(tmp_path / "home")),)


HEADERS = ("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h")


def missing_beside(nvcc: Path) -> set[str]:
    found = read_compilers(
        environ={"PATH": str(nvcc.parent)}, ask=lambda command: Answer(0, nvcc_says("13.0"), ""), windows=False
    )
    return set(found.nvcc[0].missing)


@pytest.mark.skipif(os.name == "nt", reason="scripts and pip's CUDA packages are Linux's ways")
@pytest.mark.skipif(Path("/usr/include/cuda_runtime.h").exists(), reason="this machine's own headers would be found")
def test_headers_are_looked_for_in_the_toolkit_that_a_script_starts_and_in_pips_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers_module.sys, "path", [str(tmp_path / "site")])
    real = program(tmp_path / "cuda" / "bin", "nvcc")
    script = program(tmp_path / "bin", "nvcc")
    script.write_text(f'#!/bin/sh\nexec "{real}" "$@"\n', encoding="utf-8")
    assert missing_beside(script) == set(HEADERS)
    program(tmp_path / "cuda" / "include", "cuda_runtime.h")
    assert missing_beside(script) == set(HEADERS[1:])
    for header in HEADERS[1:]:
        program(tmp_path / "site" / "nvidia" / "cu13" / "include", header)
    assert missing_beside(script) == set()


def test_visual_studio_comes_from_vswhere_with_its_toolsets(tmp_path: Path) -> None:
    studio = tmp_path / "BuildTools"
    for toolset in ("14.38.33130", "14.44.35207"):
        program(studio / "VC" / "Tools" / "MSVC" / toolset / "bin" / "Hostx64" / "x64", "cl.exe")
    (studio / "VC" / "Tools" / "MSVC" / "14.50.1").mkdir()  # removed toolsets leave empty folders behind
    program(tmp_path / "Microsoft Visual Studio" / "Installer", "vswhere.exe")
    answer = json.dumps([{**VSWHERE[0], "installationPath": str(studio)}])
    environ = {"PATH": "/nowhere", "ProgramFiles(x86)": str(tmp_path)}
    found = read_compilers(
        environ=environ,
        ask=lambda command: Answer(0, answer if "vswhere" in command[0] else "", ""),
        windows=True,
    )
    assert found.visual_studio == (
        VisualStudio("Visual Studio Build Tools 2022", "17.14.36119.2", str(studio), ("14.44.35207", "14.38.33130")),
    )
    assert found.visual_studio[0].msc_version == 1944


def test_a_windows_sdk_counts_when_it_has_headers(tmp_path: Path) -> None:
    kit = tmp_path / "Windows Kits" / "10" / "Include"
    program(kit / "10.0.22621.0" / "um", "windows.h")
    (kit / "10.0.19041.0").mkdir()
    found = read_compilers(
        environ={"PATH": "/nowhere", "ProgramFiles(x86)": str(tmp_path)},
        ask=lambda command: Answer(None, "", ""),
        windows=True,
    )
    assert found.windows_sdk == ("10.0.22621.0",)


def test_a_stub_that_cannot_say_its_version_is_no_compiler(tmp_path: Path) -> None:
    program(tmp_path, "gcc")
    found = read_compilers(
        environ={"PATH": str(tmp_path)},
        ask=lambda command: Answer(1, "", "xcode-select: note: no developer tools were found"),
        windows=False,
    )
    assert found.gcc is None
