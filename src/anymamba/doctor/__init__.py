"""Opinions on the facts of `anymamba.machine`: what works here, what does not, and the one line that cures it.

`examine(machine)` runs every check of `checks/`, compares with the guide's reference environment (`reference.toml`) and
gives a verdict for each way of getting mamba_ssm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from anymamba.doctor.checks import all_checks
from anymamba.doctor.language import in_language, row_in_language
from anymamba.doctor.reference import ReferenceRow, compare
from anymamba.doctor.result import Result, Status, Way
from anymamba.doctor.verdict import Verdict, verdicts
from anymamba.machine import Machine

__all__ = ["SCHEMA", "Diagnosis", "Result", "Status", "Way", "examine"]

SCHEMA = "anymamba-doctor/1"
"""Name and version of the JSON form; the number changes when a field changes its meaning or goes away."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor has to say about one machine."""

    machine: Machine
    results: tuple[Result, ...]
    reference: tuple[ReferenceRow, ...]
    verdicts: tuple[Verdict, ...]

    def about(self, way: Way) -> tuple[Result, ...]:
        """Return the results that matter to someone who wants `way`."""
        return tuple(result for result in self.results if result.way.covers(way))

    def healthy(self, way: Way) -> bool:
        """Whether nothing failed that `way` needs."""
        return all(result.status is not Status.FAIL for result in self.about(way))

    def to_json(self, language: str = "en") -> dict[str, Any]:
        """Return plain values for `json.dumps`; texts in `language` (en or zh), ids and values the same in all."""
        from anymamba import __version__

        return {
            "schema": SCHEMA,
            "anymamba": __version__,
            "healthy": {way.value: self.healthy(way) for way in (Way.PORT, Way.NATIVE)},
            "language": language,
            "results": [
                {**asdict(in_language(one, language)), "status": one.status.value, "way": one.way.value}
                for one in self.results
            ],
            "reference": [asdict(row_in_language(row, language)) for row in self.reference],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "machine": asdict(self.machine),
        }


def examine(machine: Machine) -> Diagnosis:
    """Run all checks on `machine`."""
    results = tuple(result for check in all_checks() if (result := check(machine)) is not None)
    return Diagnosis(machine, results, tuple(compare(machine)), verdicts(machine, results))
