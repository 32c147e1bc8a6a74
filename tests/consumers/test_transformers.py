"""transformers' own classes on the port: its fast path is taken, and gives what its slow path gives.

Needs transformers (5, or a late 4 with an installed port: `anymamba install`). What each of its generations asks for, and how
its paths are taken here: transformers_paths.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from anymamba.backends import recording
from anymamba.errors import DeviceError
from consumers.small_models import MAMBA_1, MODELS, draw_model
from oracle import relative_error
from ported_upstream import port_on_path

transformers = pytest.importorskip("transformers", reason="needs transformers: python -m pip install transformers")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)

from consumers.transformers_paths import (  # noqa: E402
    FOURTH,
    forget_models,
    import_models,
    slow_path,
    take_fast_path,
)

INSTALLED = importlib.util.find_spec("mamba_ssm") is not None
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    *([] if INSTALLED else [pytest.mark.network]),
    *([] if INSTALLED or not FOURTH else [pytest.mark.skip(reason="transformers 4 needs a port: anymamba install")]),
]

DEVICE = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Which of the models this release has, their files imported beside the port."""
    if not INSTALLED:
        forget_models()  # imported by a test before, without the port: transformers takes its paths at import
    with port_on_path(tmp_path_factory.mktemp("upstream")):
        yield import_models()
    if not INSTALLED:
        forget_models()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, models: list[str]) -> None:
    """Every test on a CPU, and with --gpu on a card, where the slow path's convolution must not be rounded to TF32."""
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", torch.device(request.param))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if FOURTH and request.param == "cpu":  # FalconH1's fast path enters the card that its tensors are on
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


@pytest.fixture
def name(request: pytest.FixtureRequest, models: list[str]) -> str:
    if request.param not in models:
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    return request.param


each_model = pytest.mark.parametrize("name", MODELS, indirect=True)


def drawn(name: str, **changes: Any) -> Any:
    if name == "Zamba2" and FOURTH:  # its slow path's result depends on where chunks end; the fast path's does not
        changes.setdefault("chunk_size", 32)
    return take_fast_path(draw_model(name, **changes).to(DEVICE))


def modeling(model: Any) -> Any:
    return importlib.import_module(type(model).__module__)


LENGTH = 19  # more than two chunks of 8, and not a multiple


def draw_tokens(padded: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :5] = 0
        tokens[0, :5] = 0
    return {"input_ids": tokens.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def outputs(model: Any, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits at real tokens, and the gradients of a loss, by parameter."""
    model.zero_grad()
    real = batch["attention_mask"].bool()
    logits = model(**batch, use_cache=False).logits[real]
    logits.float().logsumexp(-1).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def largest_error(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert seen.keys() == wanted.keys()
    # a gradient that is nothing but rounding (of a shift that a norm removes) has no relative error
    scale = max(float(value.abs().max()) for value in wanted.values())
    errors = {
        name: relative_error(seen[name], value)
        for name, value in wanted.items()
        if float(value.abs().max()) > 1e-4 * scale
    }
    assert len(errors) > len(wanted) // 2
    return max(errors.values())


def skip_if_the_slow_path_norms_groups_as_one(name: str) -> None:
    norm = getattr(modeling(draw_model(name)), "MambaRMSNormGated", None)
    if name == "Mamba2" and norm is not None and "group_size" not in inspect.signature(norm).parameters:
        pytest.skip("this release's slow path norms all groups as one; its fast path and mamba_ssm do not")


@pytest.mark.parametrize(("training", "padded"), [(True, False), (True, True), (False, True)])
@each_model
def test_outputs_and_gradients_equal_the_slow_paths(name: str, training: bool, padded: bool) -> None:
    if name == "Mamba" and training and padded and FOURTH:
        pytest.skip("in transformers 4 training's fused function is not told what is padding")
    if training:
        skip_if_the_slow_path_norms_groups_as_one(name)
    model = drawn(name).train(training)  # training takes the fused functions, evaluation the single ones
    batch = draw_tokens(padded)
    with recording() as calls:
        fast = outputs(model, **batch)
    assert {operator.name for operator, _ in calls} >= {
        "causal_conv1d",
        "selective_scan" if name in MAMBA_1 else "ssd",
    }
    assert all(bool(torch.isfinite(value).all()) for value in fast.values())
    if name == "FalconMamba" and training:
        return  # its fused function norms delta after the projection, the slow path before it: they never were equal
    with slow_path(model), recording() as calls:
        slow = outputs(model, **batch)
    assert not calls
    assert largest_error(fast, slow) <= 1e-4


@each_model
def test_bf16_is_as_near_to_fp32_as_the_slow_path_is(name: str) -> None:
    skip_if_the_slow_path_norms_groups_as_one(name)
    model = drawn(name).train(name != "FalconMamba")
    batch = draw_tokens()
    with slow_path(model):
        truth = outputs(model, **batch)
    model = model.bfloat16()
    fast = outputs(model, **batch)
    with slow_path(model):
        slow = outputs(model, **batch)
    assert all(bool(torch.isfinite(value).all()) for value in fast.values())
    assert (
        relative_error(fast["logits"], truth["logits"]) <= 1.5 * relative_error(slow["logits"], truth["logits"]) + 2**-8
    )
    assert largest_error(fast, truth) <= 1.5 * largest_error(slow, truth) + 2**-6


@each_model
def test_generation_with_a_cache_gives_the_slow_paths_tokens(name: str) -> None:
    model = drawn(name).eval()
    batch = draw_tokens(padded=True)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with recording() as calls:
        fast = model.generate(**batch, **options)
    assert {operator.name for operator, _ in calls} >= {"causal_conv1d_update", "selective_state_update"}
    with slow_path(model), recording() as calls:
        slow = model.generate(**batch, **options)
    assert not calls
    assert fast.shape == (2, LENGTH + 6)
    assert torch.equal(fast, slow)


def test_no_model_says_that_its_fast_path_is_not_there(models: list[str]) -> None:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("transformers"), Listener()
    logger.addHandler(listener)
    try:
        for name in models:
            drawn(name)(**draw_tokens())
    finally:
        logger.removeHandler(listener)
    assert not [line for line in said if "fast path" in line or "falling back" in line]


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Bamba"], indirect=True)
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model = drawn(name).train()
    plain = outputs(model, **draw_tokens())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = outputs(model, **draw_tokens())
    assert largest_error(checkpointed, plain) <= 1e-5


@each_model
def test_autocast_is_near_and_its_gradients_are_finite(name: str) -> None:
    if FOURTH and name == "FalconMamba" and DEVICE.type == "cpu":
        pytest.skip("transformers 4's fused function of this model knows the autocast of cards alone")
    model = drawn(name).train()
    batch = draw_tokens()
    plain = outputs(model, **batch)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cast = outputs(model, **batch)
    assert all(bool(torch.isfinite(value).all()) for value in cast.values())
    assert cast.keys() == plain.keys()
    assert relative_error(cast["logits"], plain["logits"]) <= 5e-2


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Jamba"], indirect=True)
def test_copies_pickles_and_loaded_weights_compute_the_same(name: str) -> None:
    model, batch = drawn(name).eval(), draw_tokens()
    logits = model(**batch, use_cache=False).logits
    other = take_fast_path(draw_model(name, seed=1).to(DEVICE)).eval()
    assert not torch.equal(other(**batch, use_cache=False).logits, logits)
    other.load_state_dict(model.state_dict())
    for same in (deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert torch.equal(same(**batch, use_cache=False).logits, logits)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"], indirect=True)
def test_upstreams_checkpoints_have_the_same_keys_and_shapes_and_give_the_same_logits(name: str) -> None:
    """The model of mamba_ssm in the port, and transformers' own model that its weights are loaded into."""
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    block: dict[str, Any] = {"layer": "Mamba2", "d_state": 8}
    block |= {"headdim": 8, "chunk_size": 8} if name == "Mamba2" else {"layer": "Mamba1", "dt_rank": 4}
    groups = 1 if FOURTH else 2  # transformers 4 norms all groups as one in evaluation
    if name == "Mamba2":
        block["ngroups"] = groups
    torch.manual_seed(1)
    upstream = MambaLMHeadModel(
        MambaConfig(d_model=16, n_layer=2, vocab_size=64, ssm_cfg=block, tie_embeddings=name == "Mamba"), device=DEVICE
    ).eval()
    checkpoint = {
        key.replace("backbone.embedding.", "backbone.embeddings."): value
        for key, value in upstream.state_dict().items()
    }
    model = drawn(
        name, tie_word_embeddings=name == "Mamba", **({"n_groups": groups} if name == "Mamba2" else {})
    ).eval()
    assert {key: value.shape for key, value in checkpoint.items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }
    model.load_state_dict(checkpoint)
    tokens = draw_tokens()["input_ids"]
    assert relative_error(model(tokens, use_cache=False).logits, upstream(tokens).logits) <= 1e-5


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"], indirect=True)
def test_dynamo_finds_no_reason_to_break_the_graph(name: str) -> None:
    import torch._dynamo as dynamo

    if FOURTH:
        pytest.skip("transformers 4 takes its slow path, or looks at a cache's position, while it is compiled")
    model, tokens = drawn(name), draw_tokens()["input_ids"]

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, use_cache=False).logits

    dynamo.reset()
    seen = dynamo.explain(logits)(tokens)
    assert [str(reason.reason) for reason in seen.break_reasons] == []
    nodes = {str(node.target) for graph in seen.graphs for node in graph.graph.nodes}
    assert {"anymamba.causal_conv1d", "anymamba.selective_scan" if name == "Mamba" else "anymamba.ssd"} <= nodes
    dynamo.reset()
    compiled = torch.compile(logits, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(tokens), logits(tokens)) <= 1e-5


@pytest.mark.parametrize("name", ["Mamba2"], indirect=True)
def test_an_exported_model_computes_the_same(name: str) -> None:
    """transformers 5 exports its own PyTorch text whatever is installed."""
    if FOURTH:
        pytest.skip("transformers 4 exports by functions of its own")
    model, tokens = drawn(name).eval(), draw_tokens()["input_ids"]

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits

    exported = torch.export.export(Logits(), (tokens,))
    assert relative_error(exported.module()(tokens), Logits()(tokens)) <= 1e-4


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"], indirect=True)
def test_a_captured_model_replays_what_eager_gives(name: str) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("CUDA graphs are of a card")
    model, tokens = drawn(name).eval(), draw_tokens()["input_ids"]
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(tokens, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph, held = torch.cuda.CUDAGraph(), tokens.clone()
        with torch.cuda.graph(graph):
            out = model(held, use_cache=False).logits
        for _ in range(2):
            fresh = torch.randint_like(tokens, 3, 64)
            held.copy_(fresh)
            graph.replay()
            assert relative_error(out, model(fresh, use_cache=False).logits) <= 1e-6


@pytest.mark.parametrize("whole_mixers", [False, True])
@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Bamba"], indirect=True)
def test_offloaded_weights_are_loaded_by_accelerates_hooks(name: str, whole_mixers: bool) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: python -m pip install accelerate")
    model, batch = drawn(name).eval(), draw_tokens()
    logits = model(**batch, use_cache=False).logits
    mixers = sorted({type(module).__name__ for module in model.modules() if "Mixer" in type(module).__name__})
    accelerate.cpu_offload(model, execution_device=DEVICE, preload_module_classes=mixers if whole_mixers else None)
    assert all(parameter.is_meta for parameter in model.parameters())
    if FOURTH and not whole_mixers:  # transformers 5 runs the convolution's hook by itself
        with pytest.raises(DeviceError, match="weight is on meta"):
            model(**batch, use_cache=False)
        return
    assert relative_error(model(**batch, use_cache=False).logits, logits) <= 1e-6


def test_packed_sequences_are_kept_apart() -> None:
    """transformers' slow path refuses them."""
    model = drawn("GraniteMoeHybrid", layer_types=["mamba", "mamba"])
    tokens = draw_tokens()["input_ids"][:1]
    marks = torch.tensor([[0] * 7 + [1] * (LENGTH - 7)], dtype=torch.int32, device=DEVICE)
    packed = model(input_ids=tokens, seq_idx=marks, use_cache=False).logits
    apart = [model(input_ids=part, use_cache=False).logits for part in (tokens[:, :7], tokens[:, 7:])]
    assert relative_error(packed, torch.cat(apart, 1)) <= 1e-5


_BROKEN = """
import importlib.abc, sys

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {broken!r}:
            raise {error}("this part is broken")

sys.meta_path.insert(0, Broken())
sys.path[:0] = {path!r}
import torch
from consumers.small_models import draw_model
out = draw_model({model!r})(input_ids=torch.arange(3, 14).view(1, 11)).logits
assert torch.isfinite(out).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
@pytest.mark.parametrize(
    ("model", "broken"),
    [
        ("Mamba2", "anymamba.ops.ssd"),
        ("Mamba2", "anymamba.ops.selective_state_update"),
        ("Mamba", "anymamba.ops.causal_conv1d"),
        ("Mamba", "anymamba.ops.selective_scan"),
        ("Jamba", "anymamba"),
        ("Mamba2", "causal_conv1d_cuda"),
    ],
)
def test_a_broken_part_of_ours_breaks_no_model(model: str, broken: str, error: str) -> None:
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    script = _BROKEN.format(model=model, broken=broken, error=error, path=path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
