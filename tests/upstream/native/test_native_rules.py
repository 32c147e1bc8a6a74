"""Each rule on a small source with the fault it cures; the anchor moved; done twice; the choice of flags or edits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from anymamba.errors import OptionError, PatchError
from anymamba.faults import catalogue
from anymamba.upstream.native.rules import Target, all_rules, diff, rule, select, work_out, write

LINUX13 = Target("Linux", (13, 0), architectures=("9.0",))
GUIDE = Target("Windows", (11, 8), msc_version=1938, architectures=("8.6",))
NEWEST = Target("Windows", (13, 5), msc_version=1944, standard="c++20", architectures=("12.0+PTX",))

WORDS = """\
// this and that
int f(bool a, bool b) { const char *s = "a and b"; return a and b or not (a bitand b); }
#define BOTH(x, y) ((x) and (y))
#pragma message("x and y")
"""
SWITCHED = """\
#ifndef USE_ROCM
    #include <cub/cub.cuh>
#endif
#define BOOL_SWITCH(COND, CONST_NAME, ...) [&] { if (COND) { constexpr bool CONST_NAME = true; return __VA_ARGS__(); } \\
    else { constexpr bool CONST_NAME = false; return __VA_ARGS__(); } }()
void launch(int n) {
    constexpr int kNRows = 1;
    BOOL_SWITCH(n > 0, kPositive, [&] {
        if (kPositive) {
            #ifndef USE_ROCM
            set(kNRows, ")");
            #else
            // another #else
            set((void *) kNRows, "(");
            #endif
            after();
        }
    });
    #ifndef USE_ROCM
    outside();
    #else
    elsewhere();
    #endif
}
float k = M_LOG2E;  // M_LOG2E
"""
LADDER = """\
template <int kNThreads, int kNItems> void selective_scan_fwd_launch(P &params) {
    constexpr int kNRows = 1;
}
void dispatch(P &params) {
    #ifndef USE_ROCM
        if (params.seqlen <= 128) {
            selective_scan_fwd_launch<32, 4, input_t, weight_t>(params, stream);
        } else {
            selective_scan_fwd_launch<128, 16, input_t, weight_t>(params, stream);
        }
    #else
        selective_scan_fwd_launch<64, 4, input_t, weight_t>(params, stream);
    #endif
}
"""
SETUP = """\
FORCE_BUILD = os.getenv("X_FORCE_BUILD", "FALSE") == "TRUE"
if CUDA_HOME is not None:
    _, bare_metal_version = get_cuda_bare_metal_version(CUDA_HOME)
cc_flag.append("-gencode")
cc_flag.append("arch=compute_53,code=sm_53")
cc_flag.append("-Wall")
if bare_metal_version >= Version("11.8"):
    cc_flag.append("-gencode")
    cc_flag.append("arch=compute_90,code=sm_90")
version = parse(torch.version.cuda)
setup(install_requires=[
    "torch",
    "triton>=3",
])
"""


def edit(rule_id: str, text: str, **arguments: int) -> str:
    function = rule(rule_id).edit
    assert function is not None
    return function(text, arguments)


def test_every_rule_says_what_it_is() -> None:
    faults = {fault.id for fault in catalogue()}
    for one in all_rules():
        assert one.edit or one.flags, one.id
        assert len(one.reason) > 40 and one.says and one.compiler and one.guide and one.releases, one.id
        assert one.fault in faults or one.id == "kernel-parameters", one.id
        assert (one.edit is None) == (not one.files), one.id
    assert len({one.id for one in all_rules()}) == len(all_rules()) >= 13


def test_alternative_operators_only_where_a_compiler_reads_them() -> None:
    assert edit("alternative-operators", WORDS) == (
        '// this and that\nint f(bool a, bool b) { const char *s = "a and b"; return a && b || ! (a & b); }\n'
        '#define BOTH(x, y) ((x) && (y))\n#pragma message("x and y")\n'
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_gcc_without_operator_names_refuses_the_words_and_takes_the_edit(tmp_path: Path) -> None:
    """The cheap stand-in for cl.exe: -fno-operator-names is its C++17 behaviour."""

    def compiles(text: str) -> bool:
        (tmp_path / "a.cpp").write_text(text, encoding="utf-8")
        done = subprocess.run(
            ["g++", "-std=c++17", "-fno-operator-names", "-fsyntax-only", str(tmp_path / "a.cpp")],
            capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode == 0

    assert not compiles(WORDS)
    assert compiles(edit("alternative-operators", WORDS))


def test_rocm_blocks_go_only_inside_macro_arguments_and_no_line_moves() -> None:
    text = edit("rocm-in-macro", SWITCHED)
    assert text.count("USE_ROCM") == 2  # the includes and the function's own block stay
    assert "(void *)" not in text and 'set(kNRows, ")");' in text and "elsewhere();" in text
    lines = SWITCHED.splitlines()
    assert [text.splitlines().index(line) for line in ("            after();", "    outside();")] == [
        lines.index("            after();"), lines.index("    outside();"),
    ]  # fmt: skip


@pytest.mark.parametrize("first", ["ifdef USE_ROCM", "ifndef USE_ROCM"])
def test_rocm_blocks_keep_the_branch_of_cuda(first: str) -> None:
    text = f"X_SWITCH(a, [&] {{\n#{first}\nfirst();\n#else\nsecond();\n#endif\n}});\n"
    kept = "second();" if first.startswith("ifdef") else "first();"
    assert [line for line in edit("rocm-in-macro", text).splitlines() if line] == ["X_SWITCH(a, [&] {", kept, "});"]


def test_a_rocm_block_around_another_directive_goes_with_it() -> None:
    text = "X_SWITCH(a, [&] {\n#ifdef USE_ROCM\n#if OLD\na();\n#else\nb();\n#endif\n#endif\nc();\n});\n"
    assert [line for line in edit("rocm-in-macro", text).splitlines() if line] == ["X_SWITCH(a, [&] {", "c();", "});"]


def test_the_small_edits() -> None:
    assert "float k = 1.4426950408889634074;  // M_LOG2E" in edit("m-log2e", SWITCHED)
    assert "    static constexpr int kNRows = 1;" in edit("knrows-static", SWITCHED)
    assert edit("bool-switch-static", SWITCHED).count("static constexpr bool CONST_NAME") == 2
    assert edit("cub-names", "x(cub::LaneId()) { cub :: CTA_SYNC(); } // cub::CTA_SYNC();\n") == (
        "x((threadIdx.x % 32)) { __syncthreads(); } // cub::CTA_SYNC();\n"
    )


def test_log2e_is_the_constant() -> None:
    import math

    assert float(edit("m-log2e", "M_LOG2E")) == math.log2(math.e)


def test_the_edits_of_setup_py() -> None:
    text = edit("architectures", SETUP)
    assert "arch=" not in text and "gencode" not in text and '"-Wall"' in text
    assert "FORCE_BUILD = True\n" in edit("wheel-guess", SETUP)
    assert 'parse(torch.version.cuda or "0.0")' in edit("cpu-torch-version", SETUP)
    assert """    "triton>=3; sys_platform == 'linux'",\n""" in edit("triton-requirement", SETUP)
    stopped = edit("nvcc-missing", SETUP.replace("if CUDA_HOME", "CUDA_HOME = None\nif CUDA_HOME"))
    with pytest.raises(SystemExit, match="CUDA_HOME"):
        exec(stopped.partition("cc_flag")[0].partition("\n")[2], {})


def test_kernel_parameters_keep_what_the_host_code_assumes() -> None:
    text = edit("kernel-parameters", LADDER, kNThreads=64, kNRows=2)
    assert "<64, 4, input_t" in text and "<128, 16, input_t" in text and text.count("<64, 4,") == 2
    assert "constexpr int kNRows = 2; TORCH_CHECK(params.dim % kNRows == 0" in text
    assert edit("kernel-parameters", LADDER, kNThreads=256, kNItems=8).count("<256, 8,") == 2
    with pytest.raises(OptionError, match="2048"):
        edit("kernel-parameters", LADDER, kNThreads=256)  # long sequences would be cut at 4096
    with pytest.raises(OptionError, match="kNRows=3"):
        edit("kernel-parameters", LADDER, kNRows=3)


def small(folder: Path) -> Path:
    """A source tree of mamba_ssm 2.2.2's shape."""
    scan = folder / "csrc" / "selective_scan"
    scan.mkdir(parents=True)
    for name in ("selective_scan_fwd_kernel.cuh", "selective_scan_bwd_kernel.cuh"):
        (scan / name).write_text(SWITCHED, encoding="utf-8", newline="")
    (scan / "reverse_scan.cuh").write_text("cub::CTA_SYNC();", encoding="utf-8")
    (scan / "static_switch.h").write_text(SWITCHED, encoding="utf-8")
    (folder / "setup.py").write_text(SETUP, encoding="utf-8")
    return folder


def test_all_rules_of_a_release_together_then_again(tmp_path: Path) -> None:
    source = small(tmp_path)
    rules = [cure.rule for cure in select("mamba_ssm", "2.2.2", None)]
    changes, applied = work_out(source, "mamba_ssm", "2.2.2", rules)
    assert {done.outcome for done in applied} == {"edited"}
    assert {change.file for change in changes} == {
        "setup.py", "csrc/selective_scan/reverse_scan.cuh", "csrc/selective_scan/selective_scan_fwd_kernel.cuh",
        "csrc/selective_scan/selective_scan_bwd_kernel.cuh",
    }  # fmt: skip
    write(source, changes)
    again, applied = work_out(source, "mamba_ssm", "2.2.2", rules)
    assert not again and {done.outcome for done in applied} == {"already there"}


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_the_diff_is_a_patch(tmp_path: Path) -> None:
    source, copy = small(tmp_path / "one"), small(tmp_path / "two")
    rules = [cure.rule for cure in select("mamba_ssm", "2.2.2", None)]
    changes, _ = work_out(source, "mamba_ssm", "2.2.2", rules)
    text = diff(changes, "2.2.2")
    subprocess.run(["patch", "-p1", "-s"], input=text.encode(), cwd=copy, check=True)
    assert all((copy / change.file).read_text(encoding="utf-8") == change.after for change in changes)


def test_line_ends_of_windows_stay(tmp_path: Path) -> None:
    source = small(tmp_path)
    header = source / "csrc" / "selective_scan" / "selective_scan_fwd_kernel.cuh"
    header.write_bytes(SWITCHED.replace("\n", "\r\n").encode())
    changes, _ = work_out(source, "mamba_ssm", "2.2.2", [rule("rocm-in-macro"), rule("m-log2e")])
    after = next(change.after for change in changes if change.file.endswith("fwd_kernel.cuh"))
    assert after.count("\r\n") == SWITCHED.count("\n")


def test_an_anchor_that_moved_is_an_error_with_the_way_on(tmp_path: Path) -> None:
    source = small(tmp_path)
    (source / "csrc" / "selective_scan" / "reverse_scan.cuh").write_text("// cub::LaneId()\n", encoding="utf-8")
    with pytest.raises(PatchError, match=r"cub-names does not fit the sources of mamba_ssm 2\.2\.2") as error:
        work_out(source, "mamba_ssm", "2.2.2", [rule("cub-names")])
    assert "--without cub-names" in error.value.next_step
    (source / "csrc" / "selective_scan" / "reverse_scan.cuh").unlink()
    with pytest.raises(PatchError, match="no file"):
        work_out(source, "mamba_ssm", "2.2.2", [rule("cub-names")])
    # a release newer than all that are known may have lost the fault
    assert work_out(source, "mamba_ssm", "99.0", [rule("cub-names")]) == ([], [])


def test_other_arguments_after_the_first_are_an_error(tmp_path: Path) -> None:
    source = tmp_path
    scan = source / "csrc" / "selective_scan"
    scan.mkdir(parents=True)
    for name in ("selective_scan_fwd_kernel.cuh", "selective_scan_bwd_kernel.cuh"):
        (scan / name).write_text(LADDER, encoding="utf-8")
    wish = [rule("kernel-parameters")]
    write(source, work_out(source, "mamba_ssm", "2.2.2", wish, {"kNThreads": 64})[0])
    assert not work_out(source, "mamba_ssm", "2.2.2", wish, {"kNThreads": 64})[0]
    with pytest.raises(PatchError, match="other arguments"):
        work_out(source, "mamba_ssm", "2.2.2", wish, {"kNThreads": 128})


def chosen(name: str, version: str, target: Target, **options: list[str]) -> dict[str, tuple[str, ...] | None]:
    return {
        cure.rule.id: None if cure.flags is None else cure.flags.host + cure.flags.nvcc
        for cure in select(name, version, target, **options)
    }


def test_a_build_takes_flags_where_flags_do_and_only_what_its_compilers_ask_for() -> None:
    assert chosen("mamba_ssm", "2.2.2", GUIDE) == {
        "architectures": ("-gencode=arch=compute_86,code=sm_86",),
        "knrows-static": ("-Xcompiler", "/permissive-"),
        "m-log2e": ("-D_USE_MATH_DEFINES", "-D_USE_MATH_DEFINES"),
        "rocm-in-macro": None,
    }
    assert chosen("mamba_ssm", "2.2.2", LINUX13) == {
        "architectures": ("-gencode=arch=compute_90,code=sm_90",),
        "cub-names": None,
    }
    assert chosen("causal_conv1d", "1.4.0", GUIDE)["alternative-operators"] == ("/permissive-",)
    newest = chosen("mamba_ssm", "2.3.2.post1", NEWEST)
    assert set(newest) == {"architectures", "conforming-preprocessor", "m-log2e", "rocm-in-macro"}
    assert newest["architectures"] == (
        "-gencode=arch=compute_120,code=sm_120", "-gencode=arch=compute_120,code=compute_120",
    )  # fmt: skip


def test_a_visual_studio_newer_than_the_toolkit_gets_its_flags() -> None:
    late = Target("Windows", (11, 8), msc_version=1944, architectures=("8.6",))
    assert chosen("causal_conv1d", "1.4.0", late)["msvc-guard"] == (
        "-allow-unsupported-compiler", "-D_ALLOW_COMPILER_AND_STL_VERSION_MISMATCH",
    )  # fmt: skip
    assert "msvc-guard" not in chosen("causal_conv1d", "1.4.0", GUIDE)


def test_rules_can_be_left_out_or_asked_for() -> None:
    assert "m-log2e" not in chosen("mamba_ssm", "2.2.2", GUIDE, without=["m-log2e"])
    assert chosen("mamba_ssm", "2.2.2", GUIDE, asked=["m-log2e"])["m-log2e"] is None  # by its edit
    assert "bool-switch-static" in chosen("mamba_ssm", "2.2.2", LINUX13, asked=["bool-switch-static"])
    with pytest.raises(OptionError, match="no rule 'm-log3e'"):
        select("mamba_ssm", "2.2.2", None, without=["m-log3e"])
