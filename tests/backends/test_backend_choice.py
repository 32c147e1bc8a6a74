"""Which backend computes a call: order, requests by name, refusals with reasons, and never a stale choice."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from anymamba import backends
from anymamba.backends import Operator, choices, choose, recording, requested, use_backend
from anymamba.errors import BackendRefusedError, UnknownBackendError


class Call(NamedTuple):
    """A call of the made-up operator."""

    device: torch.device
    dtype: torch.dtype
    width: int


OPERATOR = Operator("stir", family="stir", functions=("stir_forward",))
CALL = Call(torch.device("cpu"), torch.float32, 4)


@pytest.fixture(autouse=True)
def _three_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """first: only width 4; second: anything; third: lacks the function; absent: not on this machine."""
    monkeypatch.delenv(backends.ENVIRONMENT_VARIABLE, raising=False)

    def package(name: str, priority: int, why_not: str | None = None) -> ModuleType:
        module = ModuleType(name)
        module.PRIORITY, module.SUMMARY, module.unavailable = priority, f"the {name} one", lambda: why_not
        return module

    def family(name: str, **contents: object) -> ModuleType:
        module = ModuleType(f"{name}.stir")
        vars(module).update(contents)
        return module

    packages = {
        "absent": package("absent", 1, "no such card"),
        "first": package("first", 10),
        "second": package("second", 20),
        "third": package("third", 30),
    }

    def refusal(operator: Operator, call: Call) -> str | None:
        return None if call.width == 4 else f"width {call.width} is not 4"

    modules = {
        "first": family("first", stir_forward=lambda: "first", refusal=refusal),
        "second": family("second", stir_forward=lambda: "second"),
        "third": family("third"),
    }
    monkeypatch.setattr(backends, "names", lambda: ("absent", "first", "second", "third"))
    monkeypatch.setattr(backends, "_package", packages.__getitem__)
    monkeypatch.setattr(backends, "_module", lambda name, _family: modules[name])
    monkeypatch.setattr(backends, "_chosen", {})


def chosen(call: Call = CALL) -> str:
    """Return the name of the backend that computes the call."""
    found: str = choose(OPERATOR, call).stir_forward()
    return found


def test_the_first_that_can_does() -> None:
    assert chosen() == "first"
    assert chosen(CALL._replace(width=5)) == "second"


def test_every_refusal_has_its_reason() -> None:
    assert choices(OPERATOR, CALL._replace(width=5)) == [
        ("absent", "no such card"),
        ("first", "width 5 is not 4"),
        ("second", None),
        ("third", "has no stir_forward yet"),
    ]


def test_the_environment_asks_for_one_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "second")
    assert requested() == "second"
    assert chosen() == "second"


def test_a_changed_environment_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("second", "first", "second"):
        monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, name)
        assert chosen() == name
    monkeypatch.delenv(backends.ENVIRONMENT_VARIABLE)
    assert chosen() == "first"


def test_an_empty_variable_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "")
    assert requested() is None
    assert chosen() == "first"


def test_the_context_goes_before_the_environment_and_nests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "first")
    with use_backend("second"):
        assert chosen() == "second"
        with use_backend("first"):
            assert chosen() == "first"
        assert chosen() == "second"
    assert chosen() == "first"


def test_the_context_ends_with_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("second"):
        _ = 1 / 0
    assert requested() is None


def test_a_request_never_falls_back() -> None:
    with use_backend("first"), pytest.raises(BackendRefusedError) as caught:
        choose(OPERATOR, CALL._replace(width=5))
    assert caught.value.what == "Backend 'first' cannot run stir for device cpu, dtype torch.float32, width 5."
    assert caught.value.why == "width 5 is not 4"
    assert backends.ENVIRONMENT_VARIABLE in caught.value.next_step


def test_a_backend_that_is_not_here_refuses_by_name() -> None:
    with use_backend("absent"), pytest.raises(BackendRefusedError, match="no such card"):
        choose(OPERATOR, CALL)


def test_an_unknown_name_is_answered_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownBackendError) as caught, use_backend("fourth"):
        pass
    assert "absent, first, second, third" in caught.value.why
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "fourth")
    with pytest.raises(UnknownBackendError):
        choose(OPERATOR, CALL)


def test_when_none_can_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "names", lambda: ("absent", "third"))
    with pytest.raises(BackendRefusedError) as caught:
        choose(OPERATOR, CALL)
    assert caught.value.why == "absent: no such card; third: has no stir_forward yet"


def test_a_refusal_is_not_remembered_as_a_choice() -> None:
    for _ in range(2):
        with use_backend("third"), pytest.raises(BackendRefusedError):
            choose(OPERATOR, CALL)


def test_threads_see_their_own_context() -> None:
    inside, outside, seen = threading.Event(), threading.Event(), {}

    def other() -> None:
        inside.wait(5)
        seen["other"] = chosen()
        outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_backend("second"):
        inside.set()
        assert outside.wait(5)
        seen["this"] = chosen()
    thread.join()
    assert seen == {"other": "first", "this": "second"}


def test_ever_new_calls_do_not_grow_the_cache_for_ever() -> None:
    for width in range(5000):
        choose(OPERATOR, CALL._replace(width=width))
    assert len(backends._chosen) <= 4097


def test_recording_notes_the_calls_and_leaves_no_trace() -> None:
    chosen()
    with recording() as calls:
        chosen()
        chosen()
    assert calls == [(OPERATOR, CALL)]
    chosen()
    assert len(calls) == 1


def test_whoever_watches_sees_every_call_of_a_backends_function_and_then_no_more() -> None:
    seen: list[backends.Watched] = []
    assert chosen() == "first"
    with backends.watching(seen.append):
        assert backends.is_recording()
        assert [chosen(), chosen(CALL._replace(width=5))] == ["first", "second"]
    assert chosen() == "first"
    assert [(call.module.__name__, call.operator, call.function, call.arguments) for call in seen] == [
        ("first.stir", OPERATOR, "stir_forward", ()),
        ("second.stir", OPERATOR, "stir_forward", ()),
    ]
    assert not backends.is_recording()
