"""What of a CUDA kernel can be tuned: where parameters are kept, by card and source, and that launches are settled anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anymamba.backends import tuned
from anymamba.backends.cuda.runtime import cached, runtime
from anymamba.backends.cuda.runtime import kernel as _kernel
from anymamba.backends.cuda.runtime.sources import read

__all__ = ["chosen", "place"]


def place(kernel: str, file: str, shape: str, device: int) -> tuned.Place:
    """Return where parameters of `kernel` in `file` for this shape class are kept."""
    return tuned.Place(_card(device), f"cuda {kernel}", shape, _source(file))


def chosen(
    kernel: str, file: str, shape: str, device: int, offered: Sequence[tuned.Parameters]
) -> tuned.Parameters | None:
    """Return tuned parameters, None for the usual ones; the callers remember the answer with what they settle."""
    return tuned.find(place(kernel, file, shape, device), offered)


@cached
def _card(device: int) -> str:
    driver: Any = runtime().driver
    name = torch.cuda.get_device_name(device) if driver.device_type == "cuda" else driver.device_type
    return f"{name}, sm_{runtime().capability(device)}, {driver.multiprocessors(device)} multiprocessors"


def _source(file: str) -> str:
    source = read(file)
    return tuned.fingerprint(source.text, *(f"{name}\n{text}" for name, text in sorted(source.headers.items())))


def _settle_anew() -> None:
    for forget in _kernel._forget:  # plans; compiled kernels stay with the runtime
        forget()


tuned.on_forget(_settle_anew)
