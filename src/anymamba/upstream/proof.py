"""The proof that an install works: run as `python -m anymamba.upstream.proof` in a fresh process.

Imports both packages and the extension modules, runs the guide's script, and prints one line of JSON. It is the quick proof
of the installation; `anymamba verify` proves the numbers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

__all__ = ["PREFIX", "main"]

PREFIX = "anymamba-proof:"


def main(wanted: list[str]) -> int:
    """Check each ``name==version`` of `wanted`; return 0 when everything holds."""
    report: dict[str, Any] = {"versions": {}, "failed": None}
    try:
        versions = dict(text.split("==", 1) for text in wanted)
        for name, version in versions.items():
            report["versions"][name] = importlib.metadata.version(name)
            _check(report["versions"][name] == version, f"{name} is {report['versions'][name]}, not {version}")
            if name in ("selective_scan", "anymamba_extensions"):  # modules without a package
                _modules(name)
                continue
            package = importlib.import_module(name)
            origin = importlib.metadata.distribution(name).locate_file(f"{name}/__init__.py")
            _check(str(package.__file__) == str(origin), f"{name} is imported from {package.__file__}, not {origin}")
        if "causal_conv1d" in versions:
            report["convolution"] = _convolution()
        if "mamba_ssm" in versions:
            report["guide"] = _guide()
    except Exception as error:  # whatever an import of foreign code raises is the answer
        report["failed"] = f"{type(error).__name__}: {error}"
    print(PREFIX + json.dumps(report))
    return 1 if report["failed"] else 0


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _modules(name: str) -> None:
    from anymamba.upstream.port.families import EXTENSIONS

    for extension in EXTENSIONS[name]:
        module = importlib.import_module(extension)
        origin = importlib.metadata.distribution(name).locate_file(f"{extension}.py")
        _check(str(module.__file__) == str(origin), f"{extension} is imported from {module.__file__}, not {origin}")
    if name == "selective_scan":
        import torch

        scan = importlib.import_module("selective_scan_cuda_oflex")
        ones = torch.ones(1, 2, 3)
        out, _ = scan.fwd(
            ones, ones, torch.zeros(2, 1), ones[:, :1, None], ones[:, :1, None], None, None, False, 1, True
        )
        _check(out[0, 0].tolist() == [1.0, 2.0, 3.0], f"selective_scan_cuda_oflex gave {out[0, 0].tolist()}")
    else:
        _check(callable(importlib.import_module("selective_scan_cuda").bwd), "selective_scan_cuda has no bwd")


def _compiled(extension: ModuleType) -> bool:
    """Return whether an extension is upstream's own, compiled for cards, and not our Python module."""
    return not str(extension.__file__).endswith(".py")


def _convolution() -> list[int]:
    import torch

    extension = importlib.import_module("causal_conv1d_cuda")
    convolve = importlib.import_module("causal_conv1d").causal_conv1d_fn
    device = "cuda" if _compiled(extension) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return []  # built here for another machine's card: it loads, and that is all that can be seen
    x = torch.arange(10.0, device=device).view(1, 2, 5)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    y = convolve(x, weight).cpu()
    x = x.cpu()
    _check(torch.equal(y[0, 0], torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0])), f"causal_conv1d_fn gave {y[0, 0].tolist()}")
    _check(torch.equal(y[0, 1], x[0, 1]), f"causal_conv1d_fn gave {y[0, 1].tolist()}")
    _check(callable(extension.causal_conv1d_fwd), "causal_conv1d_cuda has no causal_conv1d_fwd")
    return list(y.shape)


def _guide() -> list[int]:
    import torch

    extension, package = importlib.import_module("selective_scan_cuda"), importlib.import_module("mamba_ssm")
    _check(callable(extension.fwd), "selective_scan_cuda has no fwd")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and _compiled(extension):
        return []
    x = torch.randn(2, 64, 16, device=device)
    layers = {"Mamba": package.Mamba(d_model=16, d_state=16, d_conv=4, expand=2)}
    # since 2.0; upstream's own calls causal_conv1d's extension without asking whether it is there
    if hasattr(package, "Mamba2") and importlib.util.find_spec("causal_conv1d") is not None:
        # eight heads: upstream's compiled convolution wants rows of in_proj that are a multiple of 8 wide
        layers["Mamba2"] = package.Mamba2(d_model=16, d_state=16, headdim=4, chunk_size=32)
    for name, layer in layers.items():
        y = layer.to(device)(x)
        _check(y.shape == x.shape, f"{name} gave shape {tuple(y.shape)}, not {tuple(x.shape)}")
        _check(bool(torch.isfinite(y).all()), f"{name} gave values that are not finite")
        y.sum().backward()
        bad = [part for part, p in layer.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]
        _check(not bad, f"{name}'s backward gave no finite gradient for {', '.join(bad)}")
    return list(x.shape)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
