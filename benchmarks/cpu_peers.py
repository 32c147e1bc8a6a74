"""What others offer on a CPU, under the names of our arguments: mamba.py (mambapy) and transformers' own PyTorch path.

Neither is measured through our kernels: transformers takes an installed mamba_ssm or causal_conv1d where it finds one, so both
are hidden while it is imported. A peer that is not there, or has none of an operator, has no entry.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["blocks", "operators", "versions"]

Peer = Callable[..., Any]
MAMBA_PY, TRANSFORMERS = "mamba.py", "transformers"


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    hidden = ("mamba_ssm", "causal_conv1d")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in hidden}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: "No module named"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(kept)


def _load(module: str) -> Any:
    try:
        with _without_kernels():
            return importlib.import_module(module)
    except ImportError:
        return None


def versions() -> dict[str, str]:
    """Return the version of each peer that is installed."""
    from importlib import metadata

    found = {}
    for name, package in ((MAMBA_PY, "mambapy"), (TRANSFORMERS, "transformers")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return found


def operators() -> dict[str, dict[str, Peer]]:
    """Return, by the names of the subjects of cpu_reference.py, each peer's way to do the same."""
    found: dict[str, dict[str, Peer]] = {}
    mamba_py = _load("mambapy.mamba")
    if mamba_py is not None:
        found.setdefault("selective_scan", {})[MAMBA_PY] = _mamba_py_scan(mamba_py.MambaBlock.selective_scan)
    one, two = _load("transformers.models.mamba.modeling_mamba"), _load("transformers.models.mamba2.modeling_mamba2")
    for subject, module, name, adapt in (
        ("selective_scan", one, "mamba_selective_scan", _transformers_scan),
        ("causal_conv1d", one, "causal_conv1d_fn", _transformers_convolution),
        ("causal_conv1d_update", one, "causal_conv1d_update", _transformers_convolution_step),
        ("selective_state_update", one, "mamba_selective_state_update", _transformers_step),
        ("ssd", two, "mamba2_chunk_scan", _transformers_ssd),
    ):
        function = getattr(module, name, None)
        if function is not None:
            found.setdefault(subject, {})[TRANSFORMERS] = adapt(function)
    return found


def blocks(width: int) -> dict[str, dict[str, torch.nn.Module]]:
    """Return each peer's whole Mamba and Mamba2 block of this d_model: expand 2, 16 and 128 states, heads of 64."""
    found: dict[str, dict[str, torch.nn.Module]] = {"Mamba block": {}, "Mamba2 block": {}}
    mamba_py = _load("mambapy.mamba")
    if mamba_py is not None:  # its Mamba2 needs mamba_ssm's kernels
        config = mamba_py.MambaConfig(d_model=width, n_layers=1)
        found["Mamba block"][MAMBA_PY] = mamba_py.MambaBlock(config)
    one, two = _load("transformers.models.mamba.modeling_mamba"), _load("transformers.models.mamba2.modeling_mamba2")
    if one is not None:
        given = one.MambaConfig(hidden_size=width, state_size=16, expand=2, conv_kernel=4, num_hidden_layers=1)
        found["Mamba block"][TRANSFORMERS] = one.MambaMixer(given, layer_idx=0)
    if two is not None:
        given = two.Mamba2Config(
            hidden_size=width, num_heads=2 * width // 64, head_dim=64, state_size=128, expand=2, n_groups=1,
            chunk_size=256, num_hidden_layers=1,
        )  # fmt: skip
        found["Mamba2 block"][TRANSFORMERS] = two.Mamba2Mixer(given, layer_idx=0)
    return found


def _mamba_py_scan(scan: Peer) -> Peer:
    def run(**a: Any) -> torch.Tensor:
        u, delta, z, B, C = (a[name].transpose(1, 2) for name in ("u", "delta", "z", "B", "C"))
        y = scan(None, u, F.softplus(delta + a["delta_bias"]), a["A"], B, C, a["D"])
        out: torch.Tensor = y * F.silu(z)
        return out

    return run


def _transformers_scan(scan: Peer) -> Peer:
    def run(**a: Any) -> Any:
        return scan(
            a["u"], a["delta"], a["A"], a["B"], a["C"], D=a["D"], z=a["z"], delta_bias=a["delta_bias"],
            delta_softplus=True,
        )  # fmt: skip

    return run


def _transformers_convolution(convolve: Peer) -> Peer:
    return lambda **a: convolve(a["x"], a["weight"], a["bias"], activation="silu")


def _transformers_convolution_step(step: Peer) -> Peer:
    return lambda **a: step(a["x"].unsqueeze(-1), a["conv_state"], a["weight"], a["bias"], activation="silu")


def _transformers_step(step: Peer) -> Peer:
    def run(**a: Any) -> Any:
        if a["state"].dim() == 4:
            raise NotImplementedError("its step of Mamba-1 has no heads")
        return step(
            a["state"], a["x"], a["dt"], a["A"], a["B"], a["C"], D=a["D"], dt_bias=a["dt_bias"], dt_softplus=True,
            z=a["z"],
        )  # fmt: skip

    return run


def _transformers_ssd(scan: Peer) -> Peer:
    def run(**a: Any) -> torch.Tensor:
        y = scan(
            a["x"], a["dt"], a["A"], a["B"], a["C"], chunk_size=a["chunk_size"], D=a["D"], dt_bias=a["dt_bias"],
            dt_softplus=True,
        )  # fmt: skip
        out: torch.Tensor = y * F.silu(a["z"])
        return out

    return run
