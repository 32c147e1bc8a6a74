"""CUDA kernels compiled on this machine by the NVRTC that PyTorch carries."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from anymamba.backends.cuda.runtime import Variant

__all__ = ["PRIORITY", "SUMMARY", "device_refusal", "families", "unavailable", "variants", "warmup"]

PRIORITY = 10
SUMMARY = "CUDA kernels compiled on this machine by the NVRTC that PyTorch carries; no toolkit, no Triton"


def unavailable() -> str | None:
    """Return None, or why no kernel can run in this process. Touches neither the driver nor NVRTC without a card."""
    kernel = sys.modules.get("anymamba.backends.cuda.runtime.kernel")  # on a machine without a card nobody imports it
    return None if kernel is not None and kernel._replacement is not None else _unavailable()


@functools.cache
def _unavailable() -> str | None:
    if torch.version.cuda is None:
        other = getattr(torch.version, "hip", None)
        return (
            "this PyTorch is built for ROCm" if other else f"this PyTorch ({torch.__version__}) is built without CUDA"
        )
    if not torch.cuda.is_available():
        return (
            "PyTorch sees no NVIDIA card (torch.cuda.is_available() is False):"
            " there is none, or its driver is older than this PyTorch needs"
        )
    from anymamba.backends.cuda.runtime.kernel import why_no_runtime

    return why_no_runtime()


def device_refusal(device: torch.device) -> str | None:
    """Return None if kernels run on `device`, or why not: what every family's `refusal` asks first."""
    from anymamba.backends.cuda.runtime import runtime

    current = runtime()
    if device.type != current.driver.device_type:
        return f"tensors are on {device}, not on a CUDA device"
    index = device.index if device.index is not None else current.driver.current_device()
    return current.why_unsupported(index)


def families() -> tuple[str, ...]:
    """Return the operator families that have kernels: the modules of this package."""
    return tuple(
        sorted(
            module.name
            for module in pkgutil.iter_modules(__path__)
            if not module.ispkg and not module.name.startswith("_")
        )
    )


def variants(wanted: Sequence[str] = (), every: bool = False) -> Iterator[Variant]:
    """Yield the kernels of the families named (default: all): those that models use, or every one."""
    for family in wanted or families():
        module = importlib.import_module(f"{__name__}.{family}")
        yield from module.variants(every)


def warmup(
    wanted: Sequence[str] = (),
    *,
    device: int | None = None,
    every: bool = False,
    progress: Callable[[int, int, Variant], None] | None = None,
) -> tuple[int, float]:
    """Compile (or take from the disk cache) and load kernels now, so that nothing waits for them later.

    Parameters
    ----------
    wanted : sequence of str
        Operator families, e.g. "causal_conv1d"; default all.
    device : int, optional
        PyTorch's index of the card; default the current one.
    every : bool
        All variants instead of those that the usual dtypes and options need.
    progress : callable, optional
        Called with (done, total, variant) after each.

    Returns
    -------
    int, float
        How many kernels are ready, and the seconds it took.

    Raises
    ------
    MachineError
        If there is no card, driver or NVRTC.
    KernelCompileError, KernelLaunchError
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from anymamba.backends.cuda.runtime import runtime
    from anymamba.errors import MachineError, OptionError

    unknown = set(wanted) - set(families())
    if unknown:
        raise OptionError(
            f"There are no kernels of {', '.join(sorted(unknown))}; there are of {', '.join(families())}."
        )
    reason = unavailable()
    if reason is not None:
        raise MachineError("There is nothing to warm up on this machine.", why=reason)
    started = time.perf_counter()
    current = runtime()
    index = current.driver.current_device() if device is None else device
    all_variants = list(variants(wanted, every))
    # NVRTC compiles without the GIL; more than a few at once only wait for memory.
    with ThreadPoolExecutor(max_workers=4) as pool:
        pending = {pool.submit(current.load, variant, index): variant for variant in all_variants}
        for done, future in enumerate(as_completed(pending), 1):
            future.result()
            if progress is not None:
                progress(done, len(pending), pending[future])
    return len(all_variants), time.perf_counter() - started
