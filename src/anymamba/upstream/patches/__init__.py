"""Repairs to upstream's Python files, one rule a module.

A rule says what it repairs, why, and for which versions; it edits the syntax tree and leaves `# anymamba: <id>` behind, by
which a second run knows that there is nothing to do. When what it looks for is not there, it raises `PatchError`.
To add a rule, add a module here with a `RULE`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from anymamba.errors import PatchError

__all__ = ["AnchorMovedError", "Applied", "Rule", "apply", "rules_for"]


class AnchorMovedError(Exception):
    """Raised by a rule's edit: what it looks for is not in the file. The message says what was looked for."""


@dataclass(frozen=True)
class Rule:
    """A repair.

    Attributes
    ----------
    id : str
        Unique, with dashes; stands in the edited file and in the provenance.
    reason : str
        Why upstream's text does not do, in one sentence.
    package : str
    versions : str
        The releases that need it, as a version specifier ("" for all).
    files : tuple of str
        Paths inside the package folder, or glob patterns (then a file that lacks the anchor is left alone).
    edit : callable
        From source text to source text, by way of its syntax tree; raises `AnchorMovedError`.
    hint : str
        Text without which a file that a glob pattern finds need not be parsed.
    """

    id: str
    reason: str
    package: str
    versions: str
    files: tuple[str, ...]
    edit: Callable[[str], str]
    hint: str = ""

    def applies_to(self, name: str, version: str) -> bool:
        """Return whether a release needs this rule."""
        return name == self.package and SpecifierSet(self.versions).contains(Version(version), prereleases=True)


@dataclass(frozen=True)
class Applied:
    """What a rule did to a file."""

    rule: str
    file: str
    outcome: str  # "edited", or "already there"


@functools.cache
def _rules() -> tuple[Rule, ...]:
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return tuple(importlib.import_module(f"{__name__}.{module}").RULE for module in modules)


def rules_for(name: str, version: str) -> list[Rule]:
    """Return the rules that a release needs."""
    return [rule for rule in _rules() if rule.applies_to(name, version)]


def apply(package_dir: Path, name: str, version: str, rules: Sequence[Rule] | None = None) -> list[Applied]:
    """Apply the rules of a release to its unpacked package folder, in place.

    Raises
    ------
    PatchError
        A rule's file or anchor is missing: this product does not know this text.
    """
    applied = []
    for rule in rules_for(name, version) if rules is None else rules:
        for pattern in rule.files:
            optional = "*" in pattern
            for path in sorted(package_dir.glob(pattern)) if optional else [package_dir / pattern]:
                outcome = _apply_to_file(rule, path, f"{name} {version}", optional)
                if outcome is not None:
                    applied.append(Applied(rule.id, path.relative_to(package_dir).as_posix(), outcome))
    return applied


def _apply_to_file(rule: Rule, path: Path, release: str, optional: bool) -> str | None:
    marker = f"# anymamba: {rule.id}\n"
    try:
        source = path.read_text(encoding="utf-8")
        if marker in source:
            return "already there"
        if optional and rule.hint not in source:
            return None
        edited = rule.edit(source)
    except AnchorMovedError as error:
        if optional:
            return None
        raise _patch_error(rule, path, release, f"The file has no {error}.") from error
    except (OSError, UnicodeDecodeError, cst.ParserSyntaxError, SyntaxError) as error:
        raise _patch_error(rule, path, release, str(error)) from error
    path.write_text(marker + edited, encoding="utf-8", newline="\n")
    return "edited"


def _patch_error(rule: Rule, path: Path, release: str, why: str) -> PatchError:
    return PatchError(
        f"Patch rule {rule.id} does not fit {path.name} of {release}.",
        why=f"{why} The rule is there because: {rule.reason}",
        next_step="install a version that `anymamba install --help` names, or report this version",
    )
