"""What of a CUDA kernel can be tuned: declared beside its launch, kept by card, source and shape class.

    TUNED = _tuning.tunable("swiglu", "swiglu.cu", threads="threads of a block: ...")
    ...
    found = TUNED.chosen(f"columns {tuned.power(dim)}", device, [{"threads": 128}, {"threads": 256}])  # None: the usual

`chosen` is called where a plan is settled, in a function decorated with `cached`: plans are forgotten when a choice changes.
`anymamba tune` needs no more than this to find a kernel, try what it offers and keep the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from anymamba.backends import tuned
from anymamba.backends.cuda.runtime import cached, runtime
from anymamba.backends.cuda.runtime import kernel as _kernel
from anymamba.backends.cuda.runtime.sources import read

__all__ = ["Tunable", "tunable"]


class Tunable(NamedTuple):
    """A kernel whose parameters can be tuned; made by `tunable`."""

    kernel: str
    file: str

    def place(self, shape: str, device: int) -> tuned.Place:
        """Return where parameters for this shape class are kept."""
        return tuned.Place(_card(device), self.kernel, shape, _source(self.file))

    def chosen(self, shape: str, device: int, offered: Sequence[tuned.Parameters]) -> tuned.Parameters | None:
        """Return tuned parameters, None for the usual ones; the callers remember the answer with what they settle."""
        return tuned.find(self.place(shape, device), offered)


def tunable(kernel: str, file: str, **meaning: str) -> Tunable:
    """Declare the parameters of `kernel` in `file`, each with what it means."""
    return Tunable(tuned.declare(f"cuda {kernel}", **meaning), file)


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
