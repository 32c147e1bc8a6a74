"""The kernels that can be tuned, each with the operator that runs it, what it offers, and where the choice is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anymamba import backends
from anymamba.backends.tuned import Place
from anymamba.measure.bench.subjects import SUBJECTS, Size, Subject

__all__ = ["Kernel", "kernels"]


@dataclass(frozen=True)
class Kernel:
    """Something to tune.

    Parameters
    ----------
    backend : str
    subject : Subject
        Its forward runs the kernel.
    place, offered : callable
        Of a Size and a dtype: where the choice is kept, and among what.
    """

    backend: str
    subject: Subject
    place: Callable[[Size, torch.dtype], Place]
    offered: Callable[[Size, torch.dtype], list[Mapping[str, int]]]


def kernels(device: torch.device) -> list[Kernel]:
    """Return the kernels that run for tensors on `device`: those of its first backend that can be tuned."""
    found: list[Kernel] = []
    for name, make in (("cuda", _cuda), ("cpu", _cpu)):
        if backends.unavailable(name) is None:
            found = make(device)
            if found:
                break
    return found


def _cpu(device: torch.device) -> list[Kernel]:
    if device.type != "cpu":
        return []
    from anymamba.backends.cpu import _tuning, causal_conv1d, selective_scan

    def kernel(module: Any, subject: str) -> Kernel:
        def place(size: Size, dtype: torch.dtype) -> Place:
            # half precision is computed in float32
            return _tuning.place(
                module.FORWARD, module, size.batch * 2 * size.width, size.length, max(dtype.itemsize, 4)
            )

        return Kernel("cpu", SUBJECTS[subject], place, lambda size, dtype: list(_tuning.offered()))

    return [kernel(selective_scan, "selective_scan"), kernel(causal_conv1d, "causal_conv1d")]


def _cuda(device: torch.device) -> list[Kernel]:
    from anymamba.backends.cuda import _tuning, causal_conv1d, device_refusal, selective_scan

    if device_refusal(device) is not None:
        return []
    index = torch.empty(0, device=device).get_device()

    def scan_place(size: Size, dtype: torch.dtype) -> Place:
        kind = selective_scan.shape_class(16, dtype.itemsize, size.batch * 2 * size.width, size.length)
        return _tuning.place(selective_scan.TUNED, f"{selective_scan.FORWARD}.cu", kind, index)

    def scan_offered(size: Size, dtype: torch.dtype) -> list[Mapping[str, int]]:
        usual, segments = selective_scan.usual_forward_shape(
            16, dtype.itemsize, size.batch, 2 * size.width, size.length, index
        )
        return list(selective_scan.offered(usual, segments, size.length))

    def convolution_place(size: Size, dtype: torch.dtype) -> Place:
        kind = causal_conv1d.shape_class(dtype.itemsize, size.batch * 2 * size.width, size.length)
        return _tuning.place(causal_conv1d.TUNED, "causal_conv1d_forward.cu", kind, index)

    return [
        Kernel("cuda", SUBJECTS["selective_scan"], scan_place, scan_offered),
        Kernel("cuda", SUBJECTS["causal_conv1d"], convolution_place, lambda size, dtype: list(causal_conv1d.PIECES)),
    ]
