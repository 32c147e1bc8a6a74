"""A port made of a small package, imported with and without Triton: where each name comes from."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import anymamba
import anymamba.ops.layer_norm
import small_upstream
from anymamba.errors import MissingOperatorError, PatchError
from anymamba.upstream.port.build import build_port
from anymamba.upstream.port.families import FAMILIES
from anymamba.upstream.port.home import complete_environment
from anymamba.upstream.port.names import read_names

REDIRECT = "mamba_ssm.ops.triton.layer_norm"


@pytest.fixture
def ported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    source = small_upstream.write_tree(tmp_path / "source", "mamba_ssm")
    (tmp_path / "port").mkdir()
    port = build_port(source, "mamba_ssm", small_upstream.VERSION, tmp_path / "port")
    monkeypatch.syspath_prepend(str(port.folder))
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in ("mamba_ssm", "triton")]:
        del sys.modules[name]
    yield port.folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] == "mamba_ssm"})


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that compiles nothing: kernels are what they decorate."""
    language: Any = ModuleType("triton.language")
    language.constexpr = int
    triton: Any = ModuleType("triton")
    triton.language, triton.jit = language, lambda function: SimpleNamespace(kernel=function)
    triton.autotune = lambda configs, key: lambda kernel: kernel
    triton.Config = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)


def test_an_operator_that_we_have_is_ours(ported: Path, without_triton: None) -> None:
    module = importlib.import_module(REDIRECT)
    assert module.layer_norm_fn is anymamba.ops.layer_norm.layer_norm_fn
    assert str(module.__file__).startswith(str(ported))


def test_a_reference_function_is_upstreams_own_text(ported: Path, without_triton: None) -> None:
    module = importlib.import_module(REDIRECT)
    assert torch.equal(module.layer_norm_ref(torch.ones(2)), torch.full((2,), 2.0))
    assert module.layer_norm_ref.__module__ == "mamba_ssm._upstream.ops.triton.layer_norm"


def test_what_nobody_has_fails_when_used_and_not_before(ported: Path, without_triton: None) -> None:
    from mamba_ssm.ops.triton.layer_norm import OnlyUpstreamFn, only_upstream_has_this

    with pytest.raises(MissingOperatorError, match=r"mamba_ssm\.ops\.triton\.layer_norm\.only_upstream_has_this"):
        only_upstream_has_this(torch.ones(2))
    with pytest.raises(MissingOperatorError, match="triton"):
        OnlyUpstreamFn.apply(torch.ones(2))
    assert "not available" in repr(only_upstream_has_this)


def test_a_broken_module_of_ours_breaks_no_import_but_the_names_use(
    ported: Path, without_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anymamba.ops.layer_norm", None)  # type: ignore[arg-type]
    module = importlib.import_module(REDIRECT)
    assert module.layer_norm_ref(3) == 6
    assert module.layer_norm_fn(0) == "upstream's kernel"  # the stand-in's leads to no kernel: upstream's text serves
    with pytest.raises(MissingOperatorError) as caught:
        module.only_upstream_has_this(torch.zeros(2, 2))
    assert "triton" in str(caught.value.why)


def test_upstreams_own_kernel_serves_where_triton_is(ported: Path, with_triton: None) -> None:
    module = importlib.import_module(REDIRECT)
    assert module.layer_norm_fn is anymamba.ops.layer_norm.layer_norm_fn
    assert module.only_upstream_has_this.__module__ == "mamba_ssm._upstream.ops.triton.layer_norm"
    assert hasattr(module._kernel, "kernel")


def test_a_name_that_upstream_imports_from_a_neighbour_is_there_too(ported: Path, without_triton: None) -> None:
    module = importlib.import_module(REDIRECT)
    assert "doubled" in dir(module)
    assert module.doubled(1) == 2


def test_a_plain_function_needs_no_compiler_unless_it_leads_to_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import triton\nfrom p.b import far\nNEW = triton.__version__\nLIMIT = 3\n"
        "@triton.jit\ndef kernel(x):\n    pass\ndef launch(x):\n    kernel[(1,)](x)\n"
        "def indirect(x):\n    return launch(x)\ndef on_card(x):\n    return torch.cuda.device(x)\n"
        "def fallback_ref(x):\n    return helper(x)\ndef helper(x):\n    return LIMIT\ndef over_there(x):\n    return far(x)\n",
        encoding="utf-8",
    )
    (tmp_path / "b.py").write_text("import triton\n@triton.jit\ndef far(x):\n    pass\n", encoding="utf-8")
    names = read_names({"p.a": tmp_path / "a.py", "p.b": tmp_path / "b.py"})
    assert names["p.a"].plain == ["LIMIT", "fallback_ref", "helper"]
    assert names["p.a"].imported == {"far": "p.b"}


def test_a_name_that_upstream_lacks_is_lacking(ported: Path, without_triton: None) -> None:
    module = importlib.import_module(REDIRECT)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = module.nothing_like_it
    assert not hasattr(module, "rms_norm_fn"), "this version had no such function, so neither has its port"


def test_importing_leaves_the_real_triton_alone(ported: Path, without_triton: None) -> None:
    importlib.import_module(REDIRECT).layer_norm_ref(torch.ones(1))
    assert sys.modules["triton"] is None


def test_an_extension_module_becomes_python(ported: Path) -> None:
    text = (ported / "selective_scan_cuda.py").read_text(encoding="utf-8")
    assert "anymamba.extensions.selective_scan_cuda" in text


def test_an_archive_without_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with pytest.raises(PatchError, match="no folder mamba_ssm"):
        build_port(tmp_path, "mamba_ssm", "2.2.2", tmp_path / "into")


def test_every_family_that_is_named_and_there_can_be_imported() -> None:
    for name in {name for modules in FAMILIES.values() for name in modules}:
        if importlib.util.find_spec(f"anymamba.ops.{name}") is not None:
            assert importlib.import_module(f"anymamba.ops.{name}").__all__


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("triton.layer_norm", {"_layer_norm_fwd", "_layer_norm_bwd"}),  # transformers 4's FalconMamba calls it
        ("triton.layernorm_gated", {"_layer_norm_fwd", "_layer_norm_bwd"}),
        ("triton.k_activations", {"_swiglu_fwd", "_swiglu_bwd"}),
        ("triton.ssd_combined", {"_mamba_chunk_scan_combined_fwd", "_mamba_chunk_scan_combined_bwd"}),
        ("triton.ssd_bmm", {"_bmm_chunk_fwd", "_bmm_chunk_bwd"}),
    ],
)
def test_private_functions_that_others_call_are_served_too(module: str, names: set[str]) -> None:
    families = [importlib.import_module(f"anymamba.ops.{family}") for family in FAMILIES[module]]
    assert names <= {name for family in families for name in family.__all__}


def test_home_is_set_where_it_is_missing_only() -> None:
    windows = {"USERPROFILE": r"C:\Users\张三"}
    assert complete_environment(windows)["HOME"] == r"C:\Users\张三"
    assert windows["TRITON_CACHE_DIR"].startswith(r"C:\Users\张三")
    assert complete_environment({"HOME": "/home/me"}) == {}
    mine = {"HOME": "", "TRITON_CACHE_DIR": "/mine", "USERPROFILE": "/u"}
    assert complete_environment(mine) == {"HOME": "/u"}
    assert mine["TRITON_CACHE_DIR"] == "/mine"


def test_a_running_port_imports_nothing_that_only_an_installation_needs() -> None:
    code = (
        "import sys\n"
        "from anymamba.upstream.port import families, generation, home, no_triton, runtime\n"
        "print([name for name in ('libcst', 'unearth', 'packaging', 'rich', 'typer') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
