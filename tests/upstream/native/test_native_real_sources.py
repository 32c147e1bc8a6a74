"""Every rule on the real archives of the package index that hold C++ and CUDA sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anymamba.machine.compilers import read_compilers
from anymamba.upstream.native.rules import Rule, all_rules, rule, work_out, write
from anymamba.upstream.native.sources import get_sources

pytestmark = pytest.mark.network

GXX = shutil.which("g++")
RELEASES = [
    ("causal_conv1d", "1.5.2"),
    ("causal_conv1d", "1.7.0"),
    ("mamba_ssm", "2.2.5"),
    ("mamba_ssm", "2.3.2.post1"),
]


@pytest.fixture(scope="module", params=RELEASES, ids="-".join)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    name, version = request.param
    folder = tmp_path_factory.mktemp(name) / "source"
    return get_sources(name, version, folder, python=Path(sys.executable)).folder, name, version


def edits_of(name: str, version: str) -> list[Rule]:
    return [one for one in all_rules() if one.edit is not None and one.applies_to(name, version)]


def test_each_rule_alone_and_all_together(release: tuple[Path, str, str]) -> None:
    source, name, version = release
    rules = edits_of(name, version)
    for one in rules:
        assert work_out(source, name, version, [one], {"kNThreads": 64} if one.asked else None)[0], one.id
    changes, applied = work_out(source, name, version, [one for one in rules if one.id != "kernel-parameters"])
    assert changes and {done.outcome for done in applied} == {"edited"}
    for change in changes:
        same_place = sum(a == b for a, b in zip(change.before.splitlines(), change.after.splitlines()))
        if change.file.startswith("csrc/"):
            assert same_place > 0.9 * len(change.before.splitlines()), change.file


@pytest.mark.skipif(not shutil.which("g++") or sys.platform == "win32", reason="needs g++")
def test_no_directive_stays_inside_a_macro_s_argument(release: tuple[Path, str, str], tmp_path: Path) -> None:
    source, name, version = release
    one = rule("rocm-in-macro")
    if not one.applies_to(name, version):
        pytest.skip("this release has none")

    def told(folder: Path) -> dict[str, bool]:
        """What a pedantic preprocessor thinks of each file; headers that are not upstream's are left empty."""
        found = {}
        for file in one.files[name]:
            names = [str(GXX), "-M", "-MG", "-x", "c++", str(folder / file)]
            listed = (
                subprocess.run(names, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ").split()
            )
            for header in listed[1:]:
                if not Path(header).is_absolute():
                    (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
                    (tmp_path / header).touch()
            command = [str(GXX), "-E", "-pedantic-errors", "-I", str(tmp_path), "-x", "c++", str(folder / file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found[file] = "embedding a directive within macro arguments is not portable" in done.stderr
        return found

    assert all(told(source).values())
    fresh = tmp_path / "edited"
    shutil.copytree(source, fresh)
    write(fresh, work_out(fresh, name, version, [one])[0])
    assert not any(told(fresh).values())


INSTANCE = """\
#include "reverse_scan.cuh"
struct Add { __device__ int operator()(int a, int b) const { return a + b; } };
struct Nothing { __device__ int operator()(int whole) { return 0; } };
__global__ void scan(int *data) {
    using Scan = BlockReverseScan<int, 128>;
    __shared__ typename Scan::TempStorage storage;
    int in[1] = {data[threadIdx.x]}, out[1];
    Nothing nothing;
    Scan(storage).InclusiveReverseScan(in, out, Add(), nothing);
    data[threadIdx.x] = out[0];
}
"""


def nvcc_13() -> str:
    nvcc = next((one for one in read_compilers().nvcc if (one.release or (0, 0)) >= (13, 0)), None)
    return nvcc.path if nvcc is not None else ""


def test_a_real_nvcc_13_says_what_the_rule_says_and_is_content_with_the_edit(tmp_path: Path) -> None:
    nvcc = nvcc_13()
    if not nvcc:
        pytest.skip("needs nvcc 13")
    source = get_sources("mamba_ssm", "2.2.5", tmp_path / "source", python=Path(sys.executable)).folder
    unit = source / "csrc" / "selective_scan" / "instance.cu"
    unit.write_text(INSTANCE, encoding="utf-8")

    def compiled() -> subprocess.CompletedProcess[str]:
        command = [nvcc, "-ptx", "-arch=sm_90", "-std=c++17", "-o", str(tmp_path / "instance.ptx"), str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    before = compiled()
    assert before.returncode != 0
    assert 'namespace "cub" has no member "LaneId"' in before.stderr + before.stdout
    assert 'namespace "cub" has no member "CTA_SYNC"' in before.stderr + before.stdout
    write(source, work_out(source, "mamba_ssm", "2.2.5", [rule("cub-names")])[0])
    after = compiled()
    assert after.returncode == 0, after.stderr
