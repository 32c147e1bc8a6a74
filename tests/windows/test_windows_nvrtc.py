"""NVRTC's Windows DLLs compile every kernel of ours to machine code: no card, no driver and no Visual Studio needed.

The laboratory names a folder with one folder of DLLs for each CUDA generation; on another Windows, the NVRTC that torch or
the nvidia wheels brought is taken.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from anymamba.backends import cuda
from anymamba.backends.cuda.runtime import sources
from anymamba.backends.cuda.runtime.architectures import OLDEST
from anymamba.backends.cuda.runtime.cache import DiskCache
from anymamba.backends.cuda.runtime.kernel import Runtime, Variant
from anymamba.backends.cuda.runtime.libraries import nvrtc_candidates, nvrtc_major, open_nvrtc
from anymamba.backends.cuda.runtime.nvrtc import Nvrtc

_ELF_MACHINE_CUDA = 190


def _libraries() -> list[Path]:
    named = os.environ.get("ANYMAMBA_LAB_NVRTC")
    if named:
        folders = sorted(Path(named).iterdir()) if Path(named).is_dir() else []
        return [path for folder in folders for path in folder.glob("nvrtc64_*.dll") if nvrtc_major(path.name)]
    return nvrtc_candidates()[:1] if os.name == "nt" else []


def _usual() -> list[Variant]:
    """What models use, and one variant of each kernel that they seldom do; all from the families' own lists."""
    usual = list(dict.fromkeys(cuda.variants()))
    seen = {variant.kernel for variant in usual}
    for variant in cuda.variants(every=True):
        if variant.kernel not in seen:
            seen.add(variant.kernel)
            usual.append(variant)
    return usual


LIBRARIES = _libraries()
needs_nvrtc = pytest.mark.skipif(not LIBRARIES, reason="no NVRTC library here: neither torch's nor the laboratory's")


@pytest.fixture(scope="module", params=LIBRARIES or [None], ids=lambda p: p.parent.name if p else "none")
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param is None:
        pytest.skip("no NVRTC library here: neither torch's nor the laboratory's")
    return Runtime(Nvrtc(open_nvrtc(request.param), str(request.param)), driver=None, cache=DiskCache(None))


def _assert_is_cubin(image: bytes, variant: Variant) -> None:
    assert image[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", image, 18)[0] == _ELF_MACHINE_CUDA
    assert variant.kernel.encode() in image


def test_every_kernel_compiles_and_every_architecture_does(runtime: Runtime) -> None:
    """Each kernel for one architecture, the architectures in turn; all pairs are the slow test below."""
    known = [number for number in runtime.compiler.architectures if number >= OLDEST]
    variants = _usual()
    assert len(variants) >= len(known)
    for number, variant in enumerate(variants):
        _assert_is_cubin(runtime.compile(variant, known[number % len(known)]).image, variant)


def test_the_kernels_compiled_here_are_all_that_there_are() -> None:
    """No `__global__` function of our sources is left out of what the families name."""
    written = {
        name
        for path in sources.FOLDER.glob("*.cu")
        for name in re.findall(r"__global__[^{;]*?\b(\w+)\(const \w+ p\)", path.read_text(encoding="utf-8"))
    }
    assert written
    assert {variant.kernel for variant in _usual()} == written


@pytest.mark.slow
def test_every_architecture_compiles_every_kernel(runtime: Runtime) -> None:
    for capability in runtime.compiler.architectures:
        if capability >= OLDEST:
            for variant in _usual():
                _assert_is_cubin(runtime.compile(variant, capability).image, variant)


@needs_nvrtc
@pytest.mark.parametrize("first", ["torch", "nvrtc"])
def test_the_builtins_are_found_whatever_was_loaded_first_and_wherever_one_stands(first: str, tmp_path: Path) -> None:
    """In a fresh process: one that has compiled before has the builtins loaded already."""
    library = LIBRARIES[-1]
    script = f"""
import os
os.chdir({str(tmp_path)!r})
if {first == "torch"}:
    import torch
from pathlib import Path
from anymamba.backends.cuda.runtime.libraries import open_nvrtc
from anymamba.backends.cuda.runtime.nvrtc import Nvrtc
nvrtc = Nvrtc(open_nvrtc(Path({str(library)!r})), "here")
source = 'extern "C" __global__ void one(float* x) {{ *x = 1; }}'
known = [a for a in nvrtc.architectures if a >= 70]
print(nvrtc.compile(source, "one.cu", {{}}, ["--gpu-architecture=sm_%d" % known[0]]).image[:4])
"""
    environment = {**os.environ, "PATH": os.environ["SYSTEMROOT"] + "\\system32"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert "ELF" in result.stdout


@needs_nvrtc
def test_the_named_library_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_NVRTC", str(LIBRARIES[0]))
    assert nvrtc_candidates() == [LIBRARIES[0]]
