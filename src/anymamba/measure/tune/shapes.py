"""For which shapes to tune: those of a model's configuration, or those that a script of the user's really calls with.

A configuration says the width alone (mamba_ssm: d_model, ssm_cfg.expand; transformers: hidden_size, expand, intermediate_size);
batch and length stay options. A recorded run says everything: the script runs as `python script.py` would, and every call that
reaches a backend with kernels to tune is noted on its way in, forward and backward, whatever model it comes from.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from anymamba.errors import OptionError
from anymamba.measure.tune.calls import Recorded, catching

__all__ = ["record", "width_of_model"]

TUNABLE = ("cuda", "cpu")
"""Backends with kernels of their own."""


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


def record(script: Path, arguments: Sequence[str] = ()) -> list[Recorded]:
    """Run a script as `python script.py ARGUMENTS` does and return the calls that can be tuned, the most frequent first.

    Raises
    ------
    OptionError
        If there is no such file, or it made no call.
    """
    if not script.is_file():
        raise OptionError(f"{script} is no file.", next_step="anymamba tune --record train.py")
    kept, kept_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with catching() as seen, contextlib.suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = kept, kept_path
    calls = [call for call, _ in seen if call.backend in TUNABLE]
    if not calls:
        others = ", ".join(sorted({call.backend for call, _ in seen}))
        raise OptionError(
            f"{script} made no call that can be tuned.",
            why=f"its calls ran on: {others}" if others else "only calls of mamba_ssm's port or anymamba.ops are seen",
            next_step="anymamba backends" if others else "anymamba provenance    (is the port installed?)",
        )
    return calls
