"""The ways to compute an operator, and the choice among them.

A backend is a package in this folder. Its `__init__` says `PRIORITY` (lower is tried first), `SUMMARY` (one line) and
`unavailable()` (None, or why nothing of it works on this machine). It has one module an operator family, named as in
`anymamba.ops`, with the functions that the operator's entry in `anymamba.ops` lists; `refusal(operator, call)` in that
module, if it is there, returns None or the reason why it cannot do this call. The first backend in order that can, does.

`ANYMAMBA_BACKEND=torch` or `with use_backend("torch"):` asks for one by name; then nothing falls back silently.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from anymamba.errors import BackendRefusedError, UnknownBackendError

__all__ = [
    "Choice",
    "Operator",
    "Watched",
    "choices",
    "choose",
    "describe",
    "is_recording",
    "names",
    "recording",
    "requested",
    "summary",
    "unavailable",
    "use_backend",
    "watching",
]

ENVIRONMENT_VARIABLE = "ANYMAMBA_BACKEND"


class Operator(NamedTuple):
    """An operator as backends see it: its name, its module in every backend, the functions that module must have."""

    name: str
    family: str
    functions: tuple[str, ...]


class Call(Protocol):
    """What a backend may look at to accept or refuse; every family has a NamedTuple with more than these."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Choice(NamedTuple):
    """One row of the table of choices: a backend and why it refuses (None: it accepts)."""

    backend: str
    refusal: str | None


_asked_for: ContextVar[str | None] = ContextVar("anymamba_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every operator in this context (this thread or task) on the backend `name`.

    Raises
    ------
    UnknownBackendError
        If there is no backend of that name.
    """
    _must_exist(name)
    token = _asked_for.set(name)
    try:
        yield
    finally:
        _asked_for.reset(token)


class pinned:  # noqa: N801 - used like a function
    """Context in which `requested()` is what it was elsewhere; for a backward, which may run later and on another thread.

    Parameters
    ----------
    name : str or None
        What `requested()` returned there. None: nothing was asked for.
    """

    __slots__ = ("name", "token")

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.token = _asked_for.set(self.name)

    def __exit__(self, *_: object) -> None:
        _asked_for.reset(self.token)


def requested() -> str | None:
    """Return the backend asked for by context or environment, or None."""
    asked = _asked_for.get()
    if asked is not None or _raw_environment is None:
        return asked or os.environ.get(ENVIRONMENT_VARIABLE) or None
    # What os.environ.get does, without encoding the name and decoding the answer: half a launch's time on every call.
    return os.environ.get(ENVIRONMENT_VARIABLE) or None if _raw_name in _raw_environment else None


_raw_environment: dict[Any, Any] | None = getattr(os.environ, "_data", None)
_raw_name = getattr(os.environ, "encodekey", str)(ENVIRONMENT_VARIABLE)


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all backends, first choice first."""
    found = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    return tuple(sorted(found, key=lambda name: int(_package(name).PRIORITY)))


_chosen: dict[tuple[Operator, Any, str | None], ModuleType] = {}


def choose(operator: Operator, call: Call) -> Any:
    """Return the module that computes `operator` for `call`.

    Raises
    ------
    BackendRefusedError
        If the backend asked for refuses, or every backend does.
    """
    # os.environ is read on every call so that monkeypatching and notebooks work; it costs 0.4 us.
    key = (operator, call, requested())
    module = _chosen.get(key)
    if module is None:
        if len(_chosen) > 4096:  # a caller with ever new sizes must not grow this for ever
            _chosen.clear()
        module = _chosen[key] = _choose(operator, call, key[2])
    return module


def choices(operator: Operator, call: Call) -> list[Choice]:
    """Return every backend's answer for this call, first choice first."""
    return [Choice(name, _refusal(name, operator, call)) for name in names()]


def summary(name: str) -> str:
    """Return the backend's own line about itself."""
    return str(_package(name).SUMMARY)


def unavailable(name: str) -> str | None:
    """Return why nothing of this backend works on this machine, or None."""
    reason = _package(name).unavailable()
    return None if reason is None else str(reason)


def describe(call: Call) -> str:
    """Return the call as words: "device cpu, dtype torch.float32, width 4"."""
    fields: dict[str, Any] = (
        call._asdict() if hasattr(call, "_asdict") else {"device": call.device, "dtype": call.dtype}
    )
    return ", ".join(f"{name} {value}" for name, value in fields.items())


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Operator, Any]]]:
    """Note every (operator, call) for which `choose` decides in this context; for diagnosis, not for two threads at once."""
    global _chosen  # noqa: PLW0603
    calls: list[tuple[Operator, Any]] = []
    kept, _chosen = _chosen, _Recorder(calls)
    try:
        yield calls
    finally:
        _chosen = kept


class Watched(NamedTuple):
    """One call of a backend's function."""

    module: ModuleType
    operator: Operator
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextlib.contextmanager
def watching(note: Callable[[Watched], object]) -> Iterator[None]:
    """Have `note` called with every call of a backend's function in this context, before it is done, on any thread."""
    global _chosen  # noqa: PLW0603
    kept, _chosen = _chosen, _Watcher(note)
    try:
        yield
    finally:
        _chosen = kept


def is_recording() -> bool:
    """Return whether choices or calls are being noted: then no operator may skip its choice."""
    return type(_chosen) is not dict


class _Recorder(dict[Any, ModuleType]):
    """A cache of choices that tells what was chosen: `choose` itself stays as short as it is."""

    def __init__(self, calls: list[tuple[Operator, Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __setitem__(self, key: Any, module: ModuleType) -> None:
        self._calls.append((key[0], key[1]))
        super().__setitem__(key, module)


class _Watcher(dict[Any, Any]):
    """A cache of choices that holds none, and gives each out with its functions watched."""

    def __init__(self, note: Callable[[Watched], object]) -> None:
        super().__init__()
        self._note = note

    def get(self, key: Any, default: Any = None) -> Any:
        return _WatchedModule(_choose(*key), key[0], self._note)


class _WatchedModule:
    """Stands for a backend's module, with the functions of one operator and nothing else."""

    def __init__(self, module: ModuleType, operator: Operator, note: Callable[[Watched], object]) -> None:
        for name in operator.functions:
            setattr(self, name, self._watched(module, operator, name, note))

    @staticmethod
    def _watched(module: ModuleType, operator: Operator, name: str, note: Callable[[Watched], object]) -> Any:
        function = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            note(Watched(module, operator, name, arguments, options))
            return function(*arguments, **options)

        return call


def _choose(operator: Operator, call: Call, wanted: str | None) -> ModuleType:
    if wanted is not None:
        _must_exist(wanted)
        reason = _refusal(wanted, operator, call)
        if reason is not None:
            raise BackendRefusedError(
                f"Backend {wanted!r} cannot run {operator.name} for {describe(call)}.",
                why=reason,
                next_step=f"unset {ENVIRONMENT_VARIABLE} (or leave the context) to let anymamba choose; "
                "`anymamba backends` shows every choice",
            )
        return _module(wanted, operator.family)
    answers = []
    for name in names():  # the first that accepts; those after it are not even imported
        answers.append(Choice(name, _refusal(name, operator, call)))
        if answers[-1].refusal is None:
            return _module(name, operator.family)
    raise BackendRefusedError(
        f"No backend can run {operator.name} for {describe(call)}.",
        why="; ".join(f"{answer.backend}: {answer.refusal}" for answer in answers),
        next_step="`anymamba backends` shows every choice",
    )


def _refusal(name: str, operator: Operator, call: Call) -> str | None:
    reason = unavailable(name)
    if reason is not None:
        return reason
    try:
        module = _module(name, operator.family)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}.{operator.family}":
            raise
        return f"has no module for {operator.family} yet"
    missing = [function for function in operator.functions if not hasattr(module, function)]
    if missing:
        return f"has no {', '.join(missing)} yet"
    verifier = getattr(module, "refusal", None)
    return None if verifier is None else verifier(operator, call)


def _must_exist(name: str) -> None:
    if name not in names():
        raise UnknownBackendError(
            f"There is no backend named {name!r}.",
            why=f"the backends are: {', '.join(names())}",
            next_step="`anymamba backends` describes them",
        )


def _package(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def _module(name: str, family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}.{family}")
