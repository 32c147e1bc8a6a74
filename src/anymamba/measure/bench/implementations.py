"""Who can do the work on this machine: our backends, and every other implementation that is installed.

Another implementation is an entry of `_OTHERS`: a function that returns what it can do, or raises NotHereError with the reason.
They run on the tensors of `blocks`, never on weights of their own, so every row computes the same thing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anymamba import backends
from anymamba.machine.packages import read_packages
from anymamba.measure.bench import blocks
from anymamba.measure.bench.subjects import SUBJECTS

__all__ = ["Implementation", "NotHereError", "implementations"]


class NotHereError(Exception):
    """The implementation does not exist on this machine; says why."""


@dataclass(frozen=True)
class Implementation:
    """One column of the comparison.

    Parameters
    ----------
    name : str
    windows : str
        Whether it works on Windows: yes, no, or what it takes.
    functions : dict
        By subject; called with the subject's arguments by name.
    ours : bool
        Then our own bounds hold, not the wider ones for others (they may multiply in TF32 and use fast exponentials).
    """

    name: str
    windows: str
    functions: dict[str, Callable[..., Any]]
    ours: bool = False


def implementations(device: torch.device) -> tuple[list[Implementation], dict[str, str]]:
    """Return what exists here for tensors on `device`, and why the others do not, by name."""
    found, absent = [], {}
    for name in backends.names():
        reason = backends.unavailable(name)
        if reason is None:
            functions = {subject.name: _on_backend(name, subject.ours) for subject in SUBJECTS.values()}
            found.append(Implementation(name, "yes", functions, ours=True))
        else:
            absent[name] = reason
    for name, (windows, make) in _OTHERS.items():
        try:
            found.append(Implementation(name, windows, make(device)))
        except NotHereError as error:
            absent[name] = str(error)
    return found, absent


def _on_backend(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(**arguments: Any) -> Any:
        with backends.use_backend(name):
            return function(**arguments)

    return run


def _native(device: torch.device) -> None:
    """Refuse unless upstream's own compiled package is what `import mamba_ssm` finds, and there is a card for it."""
    package = read_packages().of_upstream("mamba_ssm")
    if package is None:
        raise NotHereError("mamba_ssm is not installed")
    if package.kind != "native":
        raise NotHereError(f"the installed mamba_ssm {package.version} is no native build ({package.kind})")
    if device.type != "cuda":
        raise NotHereError(f"it runs on a CUDA device only, not on {device.type}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a native extension for another torch fails in many ways
        words = (str(error).splitlines() or [""])[0]
        raise NotHereError(f"import {name} fails: {type(error).__name__}: {words}") from None


def _upstream_compiled(device: torch.device) -> dict[str, Callable[..., Any]]:
    _native(device)
    interface = _import("mamba_ssm.ops.selective_scan_interface")
    found = {
        "Mamba block": blocks.mamba_block(interface.mamba_inner_fn),
        "selective_scan": interface.selective_scan_fn,
    }
    try:
        convolution = _import("causal_conv1d")
    except NotHereError:
        return {"selective_scan": interface.selective_scan_fn}  # the block needs it
    return found | {
        "causal_conv1d": convolution.causal_conv1d_fn,
        "causal_conv1d_update": convolution.causal_conv1d_update,
    }


def _upstream_triton(device: torch.device) -> dict[str, Callable[..., Any]]:
    _native(device)
    if importlib.util.find_spec("triton") is None:
        raise NotHereError("triton is not installed")
    combined = _import("mamba_ssm.ops.triton.ssd_combined")
    update = _import("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    found = {
        "Mamba-2 block": blocks.mamba2_block(combined.mamba_split_conv1d_scan_combined),
        "ssd": combined.mamba_chunk_scan_combined,
        "selective_state_update": update,
    }
    gated = _import("mamba_ssm.ops.triton.layernorm_gated")
    found["gated rms_norm"] = gated.layernorm_fn
    with contextlib.suppress(NotHereError):
        convolve = _import("causal_conv1d").causal_conv1d_update
        found["Mamba block step"] = blocks.mamba_step(convolve, update)
        found["Mamba-2 block step"] = blocks.mamba2_step(convolve, update, gated.rmsnorm_fn)
    with contextlib.suppress(NotHereError):  # its name was another before 2.0
        found["rms_norm with residual"] = _import("mamba_ssm.ops.triton.layer_norm").layer_norm_fn
    with contextlib.suppress(NotHereError):
        found["swiglu"] = _import("mamba_ssm.ops.triton.k_activations").swiglu
    return found


def _transformers(device: torch.device) -> dict[str, Callable[..., Any]]:
    if importlib.util.find_spec("transformers") is None:
        raise NotHereError("transformers is not installed")
    modeling = _import("transformers.models.mamba.modeling_mamba")
    config = _import("transformers.models.mamba.configuration_mamba").MambaConfig

    def make(width: int) -> torch.nn.Module:
        mixer = modeling.MambaMixer(
            config(hidden_size=width, state_size=blocks.DSTATE, num_hidden_layers=1, use_mambapy=False), layer_idx=0
        )
        return _Slow(mixer)

    return {"Mamba block": _module_block(make, "mixer.")}


class _Slow(torch.nn.Module):
    """The path that transformers takes without mamba_ssm, whatever is installed."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden: torch.Tensor) -> Any:
        # transformers 5 has one path, in PyTorch unless kernels are fetched from a hub, which nothing here does
        return getattr(self.mixer, "slow_forward", self.mixer)(hidden)


def _mambapy(device: torch.device) -> dict[str, Callable[..., Any]]:
    if importlib.util.find_spec("mambapy") is None:
        raise NotHereError("mambapy is not installed")
    module = _import("mambapy.mamba")

    def make(width: int) -> torch.nn.Module:
        block: torch.nn.Module = module.MambaBlock(module.MambaConfig(d_model=width, n_layers=1, d_state=blocks.DSTATE))
        return block

    return {"Mamba block": _module_block(make, "")}


_NAMES = {
    "in_proj": "in_proj.weight", "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "x_proj": "x_proj.weight",
    "delta_proj": "dt_proj.weight", "delta_bias": "dt_proj.bias", "out_proj": "out_proj.weight", "A_log": "A_log", "D": "D",
}  # fmt: skip


def _module_block(make: Callable[[int], torch.nn.Module], prefix: str) -> Callable[..., Any]:
    """Return a function of a block's arguments that runs someone's module with them as its weights."""
    modules: dict[int, torch.nn.Module] = {}

    def run(hidden: torch.Tensor, **weights: torch.Tensor) -> Any:
        width = hidden.shape[-1]
        if width not in modules:
            with torch.random.fork_rng(devices=[]):
                modules[width] = make(width).to(hidden.device)
        # A module has one dtype; the wide parameters are cast as loading a checkpoint would.
        given = {prefix + _NAMES[name]: weight.to(hidden.dtype) for name, weight in weights.items()}
        return torch.func.functional_call(modules[width], given, (hidden,))

    return run


_OTHERS: dict[str, tuple[str, Callable[[torch.device], dict[str, Callable[..., Any]]]]] = {
    "upstream compiled": ("after a build", _upstream_compiled),
    "upstream Triton": ("no", _upstream_triton),
    "transformers slow path": ("yes", _transformers),
    "mamba.py": ("yes", _mambapy),
}
