"""Tuned parameters: kept in one file, found again in any process, ignored when they no longer fit, never an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anymamba.backends import tuned

PLACE = tuned.Place("a card", "cuda scan", "length 256", "source 1")
ENTRY = tuned.Entry({"threads": 64}, "source 1", 2.0, 1.0)
OFFERED = [{"threads": 64}, {"threads": 128}]


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    tuned.forget()
    yield
    monkeypatch.undo()
    tuned.forget()


def test_there_is_nothing_at_first() -> None:
    assert tuned.find(PLACE, OFFERED) is None
    assert tuned.entries() == {}


def test_what_is_kept_is_found_and_after_a_reset_is_not() -> None:
    tuned.keep({PLACE.name: ENTRY})
    assert tuned.find(PLACE, OFFERED) == {"threads": 64}
    assert tuned.reset() == 1
    assert tuned.find(PLACE, OFFERED) is None


@pytest.mark.parametrize("changed", [{"card": "b"}, {"kernel": "k"}, {"shape": "length 512"}, {"source": "source 2"}])
def test_it_holds_for_its_card_kernel_shape_and_source_only(changed: dict[str, str]) -> None:
    tuned.keep({PLACE.name: ENTRY})
    assert tuned.find(PLACE._replace(**changed), OFFERED) is None


def test_values_that_the_backend_does_not_offer_are_ignored() -> None:
    tuned.keep({PLACE.name: ENTRY._replace(parameters={"threads": 7})})
    assert tuned.find(PLACE, OFFERED) is None


def test_the_variable_leaves_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep({PLACE.name: ENTRY})
    monkeypatch.setenv(tuned.VARIABLE, "0")
    assert tuned.find(PLACE, OFFERED) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "other"}', '{"schema": "anymamba-tuned/1", "entries": {"a": 1}}']
)
def test_a_damaged_file_is_as_none_and_is_replaced_by_the_next_entry(text: str) -> None:
    tuned.path().parent.mkdir(parents=True)
    tuned.path().write_text(text, encoding="utf-8")
    assert tuned.find(PLACE, OFFERED) is None
    tuned.keep({PLACE.name: ENTRY})
    assert tuned.find(PLACE, OFFERED) == {"threads": 64}


def test_a_trial_goes_before_the_file_and_ends() -> None:
    tuned.keep({PLACE.name: ENTRY})
    asked: list[object] = []
    tuned.on_forget(lambda: asked.append(tuned.find(PLACE, OFFERED)))
    try:
        with tuned.trial(PLACE.kernel, {"threads": 128}):
            assert tuned.find(PLACE, OFFERED) == {"threads": 128}
            with tuned.trial(PLACE.kernel, {}):
                assert tuned.find(PLACE, OFFERED) is None  # the usual ones
        assert asked == [{"threads": 128}, None, {"threads": 128}, {"threads": 64}]  # everyone asks again each time
    finally:
        tuned._forgetters.pop()


def test_processes_that_keep_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys\n"  # the module alone: importing torch eight times is not what is tested
        f"spec = importlib.util.spec_from_file_location('tuned', {tuned.__file__!r})\n"
        "tuned = importlib.util.module_from_spec(spec); sys.modules['tuned'] = tuned; spec.loader.exec_module(tuned)\n"
        f"from pathlib import Path; tuned.path = lambda: Path({str(tuned.path())!r})\n"
        "for i in range(10): tuned.keep({f'{sys.argv[1]} {i}': tuned.Entry({'threads': i}, 's', 2.0, 1.0)})\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(n)], env=_environment()) for n in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(tuned.entries()) == 30
    assert not list(tuned.path().parent.glob("*.tmp"))


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(tuned.__file__).parents[2])}


def test_sizes_of_one_class_are_those_up_to_a_power_of_two() -> None:
    assert [tuned.power(size) for size in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


def test_a_fingerprint_tells_where_one_text_ends() -> None:
    assert tuned.fingerprint("ab", "c") != tuned.fingerprint("a", "bc")


def test_the_file_says_what_it_is() -> None:
    tuned.keep({PLACE.name: ENTRY})
    document = json.loads(tuned.path().read_text(encoding="utf-8"))
    assert document["schema"] == "anymamba-tuned/1"
    assert document["entries"]["a card | cuda scan | length 256"]["parameters"] == {"threads": 64}
