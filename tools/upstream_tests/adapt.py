"""What must change in upstream's test files before they can run elsewhere than on a card: as little as possible, as data.

The files are copied to a temporary folder first; nothing of a checkout is changed, and nothing of it is kept here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Adaptation", "adapt", "adaptations"]


@dataclass(frozen=True)
class Adaptation:
    """One textual change.

    Parameters
    ----------
    name : str
        Shown in the report, with `reason`.
    file : str
        Regular expression of the test files it concerns.
    seen, wanted : str
        Regular expression and its replacement.
    cpu_only : bool
        Whether it is left out on a CUDA device.
    """

    name: str
    reason: str
    file: str
    seen: str
    wanted: str
    cpu_only: bool = True


adaptations = (
    Adaptation("device", "the device is written into the tests", r".*", r"""(["'])cuda\1""", r"\1cpu\1"),
    Adaptation(
        "missing import",
        "test_selective_state_update.py of 2.2.2 calls einops.repeat without importing it",
        r"test_selective_state_update\.py",
        r"^from einops import rearrange$",
        "from einops import rearrange, repeat",
        cpu_only=False,
    ),
    Adaptation(
        "channels",
        "4128 of 8288 channels, thousands of times over, take a CPU hours: 288 of 608",
        r"test_causal_conv1d\.py",
        r"\b4096\b(?= \+ (?:32|dim)|:4096| \+ 64)",
        "256",
    ),
    Adaptation(
        "race repetitions",
        "10 000 repetitions look for a race between thread blocks",
        r"test_causal_conv1d\.py",
        r"range\(10000\)",
        "range(20)",
    ),
    Adaptation("cuda graphs", "there are none on a CPU", r"test_generation\.py", r"\bcg=True\b", "cg=False"),
    Adaptation(
        "half on a CPU",
        "fp16 matrix products of the model's own layers accumulate in another order on a CPU than on a card",
        r"test_generation\.py",
        r"dtype = torch\.float16",
        "dtype = torch.float32",
    ),
)


def adapt(file_name: str, text: str, device: str) -> tuple[str, list[str]]:
    """Return the text of a test file for `device`, and the names of the adaptations that changed something."""
    applied = []
    for change in adaptations:
        if (change.cpu_only and device != "cpu") or not re.fullmatch(change.file, file_name):
            continue
        text, count = re.subn(change.seen, change.wanted, text, flags=re.MULTILINE)
        if count:
            applied.append(change.name)
    return text, applied
