"""Whole models of the installed mamba_ssm: the guide's script, a few training steps, generation step by step.

Everything goes through mamba_ssm's own public names, so the same checks hold for a port, for a native build and for upstream
as it comes. Models are tiny: what is proved is that the parts fit, the operators' own rows prove the numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from anymamba.measure.accuracy import relative_error

__all__ = ["CHECKS", "Check", "NotInstalledError", "Outcome", "guide_script"]


class NotInstalledError(Exception):
    """There is nothing to check here; says what is not installed."""


class Outcome(NamedTuple):
    """What a check saw."""

    passed: bool
    seen: str
    error: float | None = None
    bound: float | None = None


class Check(NamedTuple):
    """Something to do with an installed model on a device."""

    name: str
    run: Callable[[torch.device], Outcome]


def _guide(device: torch.device) -> Outcome:
    mamba = _public("Mamba")
    layer = _seeded(lambda: mamba(d_model=16, d_state=16, d_conv=4, expand=2)).to(device)
    y = layer(_randn(2, 64, 16, device=device))
    good = y.shape == (2, 64, 16) and bool(y.isfinite().all())
    return Outcome(good, str(y.shape) if good else f"{y.shape}, not all of it finite")


guide_script = Check("the guide's script", _guide)


def _mamba_trains(device: torch.device) -> Outcome:
    mamba = _public("Mamba")
    return _training(_seeded(lambda: mamba(d_model=16, d_state=16, d_conv=4, expand=2)).to(device), device)


def _mamba_steps(device: torch.device) -> Outcome:
    mamba = _public("Mamba")
    return _stepping(_seeded(lambda: mamba(d_model=16, d_state=16, d_conv=4, expand=2)).to(device), device)


def _mamba2_trains(device: torch.device) -> Outcome:
    return _training(_mamba2(device), device)


def _mamba2_steps(device: torch.device) -> Outcome:
    return _stepping(_mamba2(device), device)


def _mamba2(device: torch.device) -> Any:
    # 8 heads: upstream's kernels want a multiple of 8
    mamba2 = _public("Mamba2")
    return _seeded(lambda: mamba2(d_model=16, d_state=16, d_conv=4, expand=2, headdim=4, chunk_size=32)).to(device)


def _language_model_trains(device: torch.device) -> Outcome:
    model = _language_model(device)
    tokens = torch.arange(48, device=device).reshape(2, 24) % 7

    def loss() -> torch.Tensor:
        logits = model(tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return _descent(model, loss)


def _language_model_generates(device: torch.device) -> Outcome:
    model = _language_model(device).eval()
    prompt = torch.arange(10, device=device).reshape(2, 5)
    generated = model.generate(input_ids=prompt, max_length=12, cg=False)
    generated = getattr(generated, "sequences", generated)
    tokens = prompt
    with torch.no_grad():
        for _ in range(12 - prompt.shape[1]):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    same = torch.equal(generated, tokens)
    return Outcome(
        same, "7 tokens, as the whole forward gives" if same else f"{generated.tolist()}, not {tokens.tolist()}"
    )


def _language_model(device: torch.device) -> Any:
    _public("Mamba")
    config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig(d_model=16, n_layer=2, vocab_size=32)
    model = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
    return _seeded(lambda: model(config)).to(device)


CHECKS = (
    Check("Mamba trains", _mamba_trains),
    Check("Mamba: forward = steps", _mamba_steps),
    Check("Mamba2 trains", _mamba2_trains),
    Check("Mamba2: forward = steps", _mamba2_steps),
    Check("MambaLMHeadModel trains", _language_model_trains),
    Check("MambaLMHeadModel generates", _language_model_generates),
)


def _training(layer: Any, device: torch.device) -> Outcome:
    """Teach the layer to say the column before: it needs the state."""
    x = _randn(2, 32, 16, device=device)
    return _descent(layer, lambda: F.mse_loss(layer(x)[:, 1:], x[:, :-1]))


def _descent(model: Any, loss: Callable[[], torch.Tensor], steps: int = 5, rate: float = 5e-3) -> Outcome:
    """Step down by the gradients' signs: as good as Adam for a few steps, and no import of torch.optim, which takes 1 s."""
    losses = []
    for _ in range(steps):
        model.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=rate)
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if without:
        return Outcome(False, f"no gradient for {', '.join(without)}")
    return Outcome(losses[-1] < losses[0], f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")


def _stepping(layer: Any, device: torch.device) -> Outcome:
    """Compare the whole forward with one `step` after the other."""
    layer.eval()
    x = _randn(2, 12, 16, device=device)
    with torch.no_grad():
        whole = layer(x)
        states = layer.allocate_inference_cache(2, 12)
        columns = []
        for t in range(x.shape[1]):
            column, *states = layer.step(x[:, t : t + 1], *states)
            columns.append(column)
    error = relative_error(torch.cat(columns, dim=1), whole)
    # upstream's own Triton kernels multiply in TF32
    bound = 1e-5 if device.type == "cpu" else 5e-3
    return Outcome(error <= bound, f"{x.shape[1]} steps", error, bound)


def _public(name: str) -> Any:
    """Return a public class of the installed mamba_ssm."""
    if importlib.util.find_spec("mamba_ssm") is None:
        raise NotInstalledError("mamba_ssm is not installed; `anymamba install` brings it")
    found = getattr(importlib.import_module("mamba_ssm"), name, None)
    if found is None:
        raise NotInstalledError(f"this mamba_ssm has no {name}")
    return found


def _seeded(make: Callable[[], Any]) -> Any:
    """Make a model on the CPU with the same parameters every time; the caller's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def _randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device)
