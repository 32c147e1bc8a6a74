"""The catalogue: every entry is well formed, found in logs of its own, and not in text that only looks alike."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import machines
from anymamba.doctor import Status, examine
from anymamba.faults import Fault, Outcome, catalogue, explain
from anymamba.faults.catalogue import LANGUAGES, CatalogueError, parse
from odd_machines import ODD

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
LOGS = sorted((HERE / "logs").rglob("*.log"))
NEAR = tomllib.loads((HERE / "near_misses.toml").read_text(encoding="utf-8"))
# the checks that have something to say (not "ok") about one of the machines that the tests know
NOTICED = {
    result.id
    for machine in (*(make() for make in machines.ALL), *(machine for machine, _, _ in ODD))
    for result in examine(machine).results
    if result.status is not Status.OK
}
VALID = """
id = "x"
where = ["pip"]
sure = "sure"
unseen = "is in the call"
title.en = "a"
title.zh = "b"
cause.en = "c"
cause.zh = "d"
[[symptom]]
pattern = "boom"
[[fix]]
en = "e"
zh = "f"
"""


@pytest.mark.parametrize("path", LOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_log_is_answered_with_the_fault_whose_folder_it_is_in(path: Path) -> None:
    explanation = explain(path.read_bytes())
    wanted = path.parent.name
    if wanted in ("unknown", "clean"):
        assert explanation.outcome is Outcome(wanted), explanation.findings
    else:
        assert explanation.outcome is Outcome.EXPLAINED
        assert explanation.cause is not None
        assert explanation.cause.fault.id == wanted
        assert explanation.unexplained == ()


@pytest.mark.parametrize("fault", catalogue(), ids=lambda fault: fault.id)
def test_a_near_miss_does_not_match(fault: Fault) -> None:
    assert explain(NEAR[fault.id], faults=[fault]).findings == ()


@pytest.mark.parametrize("fault", [one for one in catalogue() if not one.wrapper], ids=lambda fault: fault.id)
def test_an_entry_has_two_logs_of_its_own(fault: Fault) -> None:
    assert len(list((HERE / "logs" / fault.id).glob("*.log"))) >= 2


def test_every_folder_of_logs_belongs_to_an_entry() -> None:
    folders = {path.parent.name for path in LOGS}
    assert folders - {"unknown", "clean"} == {one.id for one in catalogue() if not one.wrapper}
    assert set(NEAR) == {one.id for one in catalogue()}


@pytest.mark.parametrize("fault", catalogue(), ids=lambda fault: fault.id)
def test_placeholders_in_the_texts_are_groups_of_a_symptom(fault: Fault) -> None:
    groups = {name for symptom in fault.symptoms for name in symptom.pattern.groupindex}
    texts = [*fault.title.values(), *fault.cause.values(), *(fix.run for fix in fault.fixes)]
    texts += [text for fix in fault.fixes for text in fix.text.values()]
    for text in texts:
        for name in re.findall(r"\{(\w+)\}", text):
            assert name in groups, (fault.id, name)


@pytest.mark.parametrize("fault", [one for one in catalogue() if not one.wrapper], ids=lambda fault: fault.id)
def test_every_system_that_can_have_the_fault_has_a_fix(fault: Fault) -> None:
    assert all(fault.title[language] and fault.cause[language] for language in LANGUAGES)
    assert any(not fix.on for fix in fault.fixes) or {system for fix in fault.fixes for system in fix.on}


@pytest.mark.parametrize("fault", [one for one in catalogue() if not one.wrapper], ids=lambda fault: fault.id)
def test_a_fault_is_seen_beforehand_by_a_check_that_finds_fault_somewhere_or_says_why_it_cannot_be(
    fault: Fault,
) -> None:
    assert bool(fault.doctor) != bool(fault.unseen)
    if fault.doctor:
        assert fault.doctor in NOTICED


def test_a_valid_entry_is_read() -> None:
    fault = parse(VALID, "x")
    assert fault.title == {"en": "a", "zh": "b"}
    assert explain("boom", faults=[fault]).cause is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('id = "x"', 'id = "y"'),
        ('where = ["pip"]', 'where = ["moon"]'),
        ('where = ["pip"]', "where = []"),
        ('sure = "sure"', 'sure = "certain"'),
        ('title.zh = "b"', ""),
        ('pattern = "boom"', 'pattern = "("'),
        ('en = "e"', 'on = ["beos"]\nen = "e"'),
        ('zh = "f"', ""),
        ('id = "x"', 'id = "x"\nsevere = true'),
        ('id = "x"', "id = x"),
        ('unseen = "is in the call"', ""),
        ('unseen = "is in the call"', 'unseen = "is in the call"\ndoctor = "nvcc-found"'),
    ],
)
def test_a_wrong_entry_is_refused_by_name(old: str, new: str) -> None:
    with pytest.raises(CatalogueError, match=r"^x: "):
        parse(VALID.replace(old, new, 1), "x")
