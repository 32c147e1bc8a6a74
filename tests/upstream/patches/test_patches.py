"""Each rule on a small source with the seam it repairs: the edit, done twice, and the anchor moved."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import small_upstream
from anymamba.errors import PatchError
from anymamba.upstream.patches import Rule, _rules, apply, rules_for
from anymamba.upstream.patches._originals import own_imports, triton_optional

RULES = {rule.id: rule for rule in _rules()}


def _edit(rule: str, source: str) -> str:
    edited = RULES[rule].edit(source)
    ast.parse(edited)
    return edited


def _run(source: str, **modules: Any) -> dict[str, Any]:
    import sys

    names: dict[str, Any] = {"__name__": "patched"}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        exec(compile(source, "patched.py", "exec", dont_inherit=True), names)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return names


def test_every_rule_has_its_own_id_and_a_reason() -> None:
    rules = _rules()
    assert len({rule.id for rule in rules}) == len(rules) >= 7
    assert all(len(rule.reason) > 40 for rule in rules)


@pytest.mark.parametrize("name", ["mamba_ssm", "causal_conv1d"])
def test_all_rules_together_and_a_second_time(tmp_path: Path, name: str) -> None:
    package = small_upstream.write_tree(tmp_path, name) / name
    first = apply(package, name, small_upstream.VERSION)
    assert {done.outcome for done in first} == {"edited"}
    assert {done.rule for done in first} == {rule.id for rule in rules_for(name, small_upstream.VERSION)}
    once = {path: path.read_bytes() for path in package.rglob("*.py")}
    second = apply(package, name, small_upstream.VERSION)
    assert {done.outcome for done in second} == {"already there"}
    assert {path: path.read_bytes() for path in package.rglob("*.py")} == once


@pytest.mark.parametrize("rule", [rule for rule in _rules() if "*" not in rule.files[0]], ids=lambda rule: rule.id)
def test_a_moved_anchor_is_an_error_that_names_rule_and_file(tmp_path: Path, rule: Rule) -> None:
    path = tmp_path / rule.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("def something_else():\n    pass\n", encoding="utf-8")
    with pytest.raises(PatchError) as caught:
        apply(tmp_path, rule.package, "2.2.4", [rule])
    assert rule.id in caught.value.what and path.name in caught.value.what
    assert path.read_text(encoding="utf-8") == "def something_else():\n    pass\n"


@pytest.mark.parametrize("content", [None, b"def broken(:\n", b"\xff\xfe"])
def test_a_missing_or_unreadable_file_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    rule = RULES["transformers-hub"]
    path = tmp_path / rule.files[0]
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PatchError, match=rule.id):
        apply(tmp_path, rule.package, "2.2.2", [rule])


def test_amp_decorators_work_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    source = "from torch.cuda.amp import custom_bwd, custom_fwd\nf = custom_fwd(lambda ctx, x: x + 1)\n"
    assert _run(_edit("amp-decorators", source))["f"](SimpleNamespace(), 1) == 2
    assert not [warning for warning in recwarn if "amp" in str(warning.message)]


def test_amp_decorators_are_repaired_only_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# torch.cuda.amp is only named here\n", encoding="utf-8")
    assert apply(tmp_path, "mamba_ssm", "2.2.2", [RULES["amp-decorators"]]) == []
    assert not RULES["amp-decorators"].applies_to("mamba_ssm", "2.2.4")


def test_functions_are_called_as_they_are_where_torch_has_no_custom_op() -> None:
    edited = _edit("custom-op", small_upstream.CPP_FUNCTIONS)
    calls: list[tuple[object, ...]] = []
    extension = SimpleNamespace(causal_conv1d_fwd=lambda *arguments: calls.append(arguments))
    old = SimpleNamespace(library=SimpleNamespace(), Tensor=object)
    _run(edited, torch=old, causal_conv1d_cuda=extension)["forward"]("x", "out")
    assert calls == [("x", "out")]


def test_functions_stay_custom_operators_where_torch_has_them() -> None:
    seen: list[tuple[str, object]] = []

    def custom_op(name: str, *, mutates_args: set[str]) -> Any:
        seen.append((name, mutates_args))
        return lambda function: function

    new = SimpleNamespace(library=SimpleNamespace(custom_op=custom_op), Tensor=object)
    _run(_edit("custom-op", small_upstream.CPP_FUNCTIONS), torch=new, causal_conv1d_cuda=SimpleNamespace())
    assert seen == [("Somebody::_small_upstream_fwd", {"out"})]


def test_generation_runs_on_a_cpu_without_transformers() -> None:
    import torch

    source = _edit("generation-device", _edit("transformers-outputs", small_upstream.GENERATION))
    assert source.startswith("# Somebody's licence line\n")
    names = _run(source, transformers=None)
    result, graph = names["decode"](torch.zeros(1, 3), model=None, cg=True, enable_timing=True)
    assert graph is False
    assert result.sequences.shape == (1, 3) and result["scores"][0] >= 0


def test_generation_gives_transformers_container_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    names = _run(_edit("transformers-outputs", small_upstream.GENERATION))
    container = SimpleNamespace(GenerateDecoderOnlyOutput=lambda sequences, scores: ("transformers", sequences, scores))
    monkeypatch.setitem(__import__("sys").modules, "transformers.generation", container)  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "transformers", SimpleNamespace(generation=container))  # type: ignore[arg-type]
    assert names["SampleDecoderOnlyOutput"](sequences=torch.zeros(1), scores=())[0] == "transformers"


def test_an_unknown_import_from_transformers_is_not_guessed() -> None:
    moved = small_upstream.GENERATION.replace("TextStreamer\n", "TextStreamer, SomethingNew\n", 1)
    with pytest.raises(Exception, match="only decoder outputs"):
        _edit("transformers-outputs", moved)


def test_the_hub_functions_import_transformers_only_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _run(_edit("transformers-hub", small_upstream.HUB), transformers=None)
    assert names["without"]() == "no transformers needed"
    for module in ("transformers", "transformers.utils", "transformers.utils.hub"):
        monkeypatch.setitem(__import__("sys").modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError):
        names["load_config_hf"]("any")


def test_the_hub_mixin_is_optional() -> None:
    names = _run(_edit("huggingface-hub", small_upstream.HUB_MIXIN), huggingface_hub=None)
    assert names["Mamba2"]() is not None


def test_public_functions_become_ours_and_references_stay() -> None:
    import anymamba.ops

    source = _edit("rebind-varlen", small_upstream.VARLEN)
    names = _run(source, triton=None)
    assert names["causal_conv1d_varlen_states"] is anymamba.ops.causal_conv1d_varlen_states
    assert names["causal_conv1d_varlen_states_ref"](None) == "reference"
    convolution = _run(_edit("rebind-convolution", small_upstream.CONVOLUTION), causal_conv1d_cuda=SimpleNamespace())
    assert convolution["causal_conv1d_fn"] is anymamba.ops.causal_conv1d_fn
    assert "upstream" in small_upstream.CONVOLUTION and "mamba_inner_fn" in _edit("rebind-scan", small_upstream.SCAN)


def test_triton_becomes_optional_also_across_several_lines() -> None:
    source = "import triton\nfrom triton.language import (\n    constexpr,\n    load,\n)\n\nx = 1\n"
    edited = triton_optional(source)
    ast.parse(edited)
    assert edited.endswith("\n\nx = 1\n") and edited.startswith("try:\n    import triton\n")


def test_kept_modules_import_one_another() -> None:
    rule = own_imports({"mamba_ssm.ops.triton.a": "mamba_ssm._upstream.ops.triton.a"})
    source = "from mamba_ssm.ops.triton.a import x  # why\ndef f():\n    from mamba_ssm.ops.triton.a import (\n y,)\n"
    edited = rule.edit(source)
    assert edited.count("from mamba_ssm._upstream.ops.triton.a import") == 2 and "# why" in edited


def test_the_release_that_imports_from_its_authors_tree_imports_itself() -> None:
    source = "from src.ops.a import (\n    x,\n)\ndef f():\n    from src.ops.b import y\n    return 'from src.ops'\n"
    edited = _edit("source-imports", source)
    assert edited.count("from mamba_ssm.ops.") == 2 and "'from src.ops'" in edited
    assert not RULES["source-imports"].applies_to("mamba_ssm", "2.0.1")
