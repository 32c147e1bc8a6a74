"""Runs in a process of its own: imports torch, tells about it, calls operators. One JSON message a line.

Each message is written when it is known, so what was learnt before a crash or a time-out is not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import warnings
from typing import Any

__all__ = ["main"]


def main(operator_seconds: float) -> None:
    """Tell about torch; then call operators for at most `operator_seconds` (0: not at all)."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch
    except BaseException as failure:  # OSError for a DLL, ImportError, a KeyError of an extension: all are findings
        _tell({"torch": {"imports": False, "problem": f"{type(failure).__name__}: {failure}"}})
        return
    _tell({"torch": {**_describe(torch, caught), "seconds": round(time.perf_counter() - start, 2)}})
    if operator_seconds:
        _run_operators(torch, operator_seconds)


def _tell(message: dict[str, Any]) -> None:
    with _telling:
        sys.stdout.write("anymamba-probe " + json.dumps(message) + "\n")
        sys.stdout.flush()


def _describe(torch: Any, caught: list[warnings.WarningMessage]) -> dict[str, Any]:
    available = False
    with contextlib.suppress(Exception):
        available = bool(torch.cuda.is_available())
    return {
        "imports": True,
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "cuda_available": available,
        "mps": bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available()),
        "xpu": bool(getattr(torch, "xpu", None) and torch.xpu.is_available()),
        "cards": [_card(torch, index) for index in range(torch.cuda.device_count())] if available else [],
        "architectures": list(torch.cuda.get_arch_list()) if available else [],
        "numpy_works": _numpy_works(torch),
        "new_abi": bool(torch.compiled_with_cxx11_abi()) if hasattr(torch, "compiled_with_cxx11_abi") else None,
        "warnings": [str(warning.message)[:300] for warning in caught],
    }


def _card(torch: Any, index: int) -> dict[str, Any]:
    works, problem = True, ""
    try:
        ones = torch.ones(8, device=f"cuda:{index}")
        works = float((ones + ones).sum()) == 16.0
        problem = "" if works else "1 + 1 is not 2 there"
    except Exception as failure:
        works, problem = False, str(failure).splitlines()[0]
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "works": works,
        "problem": problem,
    }


def _numpy_works(torch: Any) -> bool | None:
    import importlib.util

    if importlib.util.find_spec("numpy") is None:
        return None
    try:
        torch.ones(1).numpy()
    except Exception:
        return False
    return True


def _run_operators(torch: Any, seconds: float) -> None:
    """Call every operator twice: first on the backend that has nothing to compile, then on the one that is chosen.

    The first call of a compiled backend can take half a minute (numba), and the doctor has seconds. When they are over,
    the process ends where it stands, and what the first round found remains.
    """
    from anymamba.machine._operator_calls import CALLS, devices, run

    deadline = time.perf_counter() + seconds
    timer = threading.Timer(seconds, _stop)
    timer.daemon = True
    timer.start()
    for first_round in (True, False):
        for device in devices(torch):
            for name in CALLS:
                if first_round and time.perf_counter() > deadline - 0.2:
                    _tell({"operator": {"operator": name, "device": device, "ok": None, "problem": _LATE}})
                    continue
                _tell({"operator": run(torch, name, device, backend="torch" if first_round else None)})
    timer.cancel()


_LATE = "the seconds for this were over; `anymamba verify` tries all"
_telling = threading.Lock()


def _stop() -> None:
    with _telling:  # never in the middle of a line
        sys.stdout.flush()
        os._exit(0)
