"""For which shapes to tune: those of a model's configuration, or those that a script of the user's really calls with.

A configuration says the width alone (mamba_ssm: d_model, ssm_cfg.expand; transformers: hidden_size, expand, intermediate_size);
batch and length stay options. A recorded run says everything: the script runs as `python script.py` would, and every call of
the scan, the convolution and Mamba's inner function (which runs both) is noted on its way in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from anymamba.errors import OptionError
from anymamba.measure.bench.subjects import Size

__all__ = ["record", "width_of_model"]

Seen = tuple[Size, torch.dtype]
# family, function, the argument (batch, channels, seqlen), channels for one of the width
_WATCHED = (
    ("selective_scan", "selective_scan_fn", "u", 2),
    ("causal_conv1d", "causal_conv1d_fn", "x", 2),
    ("mamba_inner", "mamba_inner_fn", "xz", 4),
)


def width_of_model(path: Path) -> int:
    """Return the width (channels / 2) of the model that a config.json, or the folder with it, describes.

    Raises
    ------
    OptionError
        If it cannot be read or describes no Mamba.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise OptionError(f"{file} is no JSON: {error}.") from error
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    width = config.get("d_model") or config.get("hidden_size")
    expand = (config.get("ssm_cfg") or {}).get("expand") or config.get("expand") or config.get("mamba_expand") or 2
    mixer = config.get("mamba_intermediate_size") or config.get("mamba_d_ssm")
    if not isinstance(width, int) or width < 1:
        raise OptionError(
            f"{file} has neither d_model nor hidden_size.",
            why="these say how wide a model's Mamba blocks are",
            next_step="give --width instead",
        )
    channels = mixer if isinstance(mixer, int) else width * expand
    return max(int(channels) // 2, 1)


def record(script: Path, arguments: Sequence[str] = ()) -> list[Seen]:
    """Run a script as `python script.py ARGUMENTS` does and return the sizes and dtypes of its calls, the most frequent first.

    Raises
    ------
    OptionError
        If there is no such file, or it made no call.
    """
    if not script.is_file():
        raise OptionError(f"{script} is no file.", next_step="anymamba tune --record train.py")
    seen: Counter[Seen] = Counter()
    kept, kept_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with _watched(seen), contextlib.suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = kept, kept_path
    if not seen:
        raise OptionError(
            f"{script} called neither the scan nor the convolution.",
            why="only calls through mamba_ssm's or causal_conv1d's port, or anymamba.ops, are seen",
            next_step="anymamba provenance    (is the port installed?)",
        )
    return [found for found, _ in seen.most_common()]


@contextlib.contextmanager
def _watched(seen: Counter[Seen]) -> Iterator[None]:
    import anymamba.ops

    undo: list[tuple[Any, str, Any]] = []
    for family, name, argument, channels in _WATCHED:
        module = importlib.import_module(f"anymamba.ops.{family}")
        watching = _watching(getattr(module, name), argument, channels, seen)
        # whoever imports it during the run finds the watching one; so do modules that hold it already
        for holder in [anymamba.ops, *(one for key, one in list(sys.modules.items()) if key.startswith("anymamba."))]:
            if getattr(holder, name, None) is watching.__wrapped__:  # type: ignore[attr-defined]
                undo.append((holder, name, getattr(holder, name)))
                setattr(holder, name, watching)
    try:
        yield
    finally:
        for holder, name, function in undo:
            setattr(holder, name, function)


def _watching(function: Callable[..., Any], argument: str, channels: int, seen: Counter[Seen]) -> Callable[..., Any]:
    position = list(inspect.signature(function).parameters).index(argument)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        tensor = arguments[position] if len(arguments) > position else options.get(argument)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 3:
            batch, dim, length = tensor.shape
            if min(batch, dim // channels, length) > 0:
                seen[Size(int(batch), int(length), int(dim) // channels), tensor.dtype] += 1
        return function(*arguments, **options)

    return call
