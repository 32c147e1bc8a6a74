"""The installed torch: what its files say, and what it says itself when imported in a process of its own.

Two questions with two answers on purpose. The files (torch/version.py) tell version and CUDA build even when the import
dies with "DLL load failed" or "undefined symbol"; the process (`_torch_probe`) tells whether it lives, what cards it sees
and whether our operators run, and may crash or hang without hurting anyone.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anymamba.machine._programs import Answer, ask

__all__ = ["OperatorRun", "Torch", "TorchCard", "read_torch"]

# A cold import on a slow Windows disk takes 20 s and more; the usual one 2-7 s.
IMPORT_SECONDS = 60.0
# Of those, what calling operators may take; what is not done then is reported so.
OPERATOR_SECONDS = 4.0


@dataclass(frozen=True)
class TorchCard:
    """A GPU as torch sees it. `works`: a small kernel ran on it; else what was said."""

    name: str
    capability: tuple[int, int]
    works: bool
    problem: str = ""


@dataclass(frozen=True)
class Torch:
    """An installed torch."""

    version: str  # "2.1.1+cu118"
    where: str
    cuda: str | None  # torch.version.cuda: the CUDA it was built with
    hip: str | None
    imports: bool
    problem: str = ""  # the import error, or how the process died
    cuda_available: bool = False
    mps: bool = False
    xpu: bool = False
    cards: tuple[TorchCard, ...] = ()
    architectures: tuple[str, ...] = ()  # torch.cuda.get_arch_list()
    numpy_works: bool | None = None  # None: numpy is not installed
    new_abi: bool | None = None  # _GLIBCXX_USE_CXX11_ABI
    seconds: float = 0.0  # how long the import took

    @property
    def release(self) -> tuple[int, int]:
        """(2, 1)."""
        parts = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(parts.group(1)), int(parts.group(2))) if parts else (0, 0)


@dataclass(frozen=True)
class OperatorRun:
    """One call of one operator, forward and backward. `ok` None: not tried (`problem` says why)."""

    operator: str
    device: str
    ok: bool | None
    backend: str = ""
    problem: str = ""
    seconds: float = 0.0


def read_torch(
    *,
    operators: bool = True,
    locate: Callable[[], Path | None] | None = None,
    probe: Callable[[bool], Answer] | None = None,
) -> tuple[Torch | None, tuple[OperatorRun, ...]]:
    """Describe the installed torch and run the operators on it.

    Parameters
    ----------
    operators : bool
        Call the operators too.
    locate : callable, optional
        Returns torch's folder or None, without importing it.
    probe : callable, optional
        Runs the probe process; tests pass their own.

    Returns
    -------
    Torch or None, tuple of OperatorRun
    """
    folder = (locate or _locate)()
    if folder is None:
        return None, ()
    answer = (probe or _probe)(operators)
    return _interpret(folder, answer)


def _locate() -> Path | None:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _probe(operators: bool) -> Answer:
    import anymamba

    # -c puts the working folder first on sys.path: make it the one that holds anymamba, never the user's.
    root = Path(anymamba.__file__).parent.parent
    code = f"from anymamba.machine._torch_probe import main; main({OPERATOR_SECONDS if operators else 0.0})"
    return ask([sys.executable, "-X", "utf8", "-c", code], seconds=IMPORT_SECONDS, folder=root)


def _interpret(folder: Path, answer: Answer) -> tuple[Torch, tuple[OperatorRun, ...]]:
    version, cuda, hip = _version_file(folder)
    said: dict[str, Any] = {}
    runs: dict[tuple[str, str], OperatorRun] = {}
    for line in answer.out.splitlines():
        # Libraries print too; only our own lines count.
        if not line.startswith("anymamba-probe "):
            continue
        try:
            message = json.loads(line.partition(" ")[2])
        except ValueError:
            continue
        if "torch" in message:
            said = message["torch"]
        elif "operator" in message:
            run = OperatorRun(**message["operator"])
            runs[run.operator, run.device] = run  # the second round's word counts
    if said.get("imports"):
        cards = tuple(
            TorchCard(card["name"], (card["capability"][0], card["capability"][1]), card["works"], card["problem"])
            for card in said["cards"]
        )
        torch = Torch(
            version=said["version"],
            where=str(folder),
            cuda=said["cuda"],
            hip=said["hip"],
            imports=True,
            problem="" if answer.ok else f"the process ended early: {_last_words(answer)}",
            cuda_available=said["cuda_available"],
            mps=said["mps"],
            xpu=said["xpu"],
            cards=cards,
            architectures=tuple(said["architectures"]),
            numpy_works=said["numpy_works"],
            new_abi=said["new_abi"],
            seconds=said["seconds"],
        )
    else:
        torch = Torch(
            version, str(folder), cuda, hip, imports=False, problem=said.get("problem") or _last_words(answer)
        )
    return torch, tuple(runs.values())


def _version_file(folder: Path) -> tuple[str, str | None, str | None]:
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown", None, None

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found.group(1) if found else None

    return value("__version__") or "unknown", value("cuda"), value("hip")


def _last_words(answer: Answer) -> str:
    lines = [line for line in answer.error.splitlines() if line.strip()]
    how = "" if answer.code in (0, 1, None) else f"exit code {answer.code}: "
    return how + (lines[-1].strip() if lines else "no message")
