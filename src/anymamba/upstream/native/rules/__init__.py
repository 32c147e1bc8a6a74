"""What upstream's C++, CUDA and setup.py need to compile elsewhere: one fault a module, each with a `RULE`.

A rule says who complains without it and in which words, which releases have the fault, and cures it by an edit, by compiler
flags, or by either (then a build takes the flags: the sources stay upstream's). An edit works on tokens, keeps every line in
its place, and leaves `// anymamba: <id>` at the file's end, by which a second run knows that nothing is to do. A rule whose
anchor is gone raises `PatchError`; only a release newer than all that this product knows may have lost the fault.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from anymamba.errors import OptionError, PatchError
from anymamba.upstream.patches import AnchorMovedError, Applied
from anymamba.upstream.releases import known_versions

__all__ = [
    "AnchorMovedError", "Arguments", "Change", "Cure", "Flags", "Rule", "Target", "all_rules", "diff", "rule", "select",
    "work_out", "write",
]  # fmt: skip

Arguments = Mapping[str, int]
"""What a rule with parameters was asked for (`kernel-parameters`); empty for the others."""


@dataclass(frozen=True)
class Target:
    """The compilers that a build uses, as far as rules look at them.

    Attributes
    ----------
    system : str
        platform.system()'s: Windows or Linux.
    cuda : (int, int)
        nvcc's release.
    msc_version : int or None
        _MSC_VER of cl.exe.
    standard : str
        "c++17" or "c++20": what torch's headers want.
    architectures : tuple of str
        "8.6", "9.0a", "12.0+PTX".
    """

    system: str
    cuda: tuple[int, int]
    msc_version: int | None = None
    standard: str = "c++17"
    architectures: tuple[str, ...] = ()

    @property
    def windows(self) -> bool:
        """Whether cl.exe is the host compiler."""
        return self.system == "Windows"


@dataclass(frozen=True)
class Flags:
    """Options for the C++ compiler (.cpp files) and for nvcc (.cu files)."""

    host: tuple[str, ...] = ()
    nvcc: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A fault and its cure.

    Attributes
    ----------
    id : str
    compiler : str
        Who complains without it, such as "cl, C++17".
    says : str
        Its words.
    reason : str
        Why, in one sentence.
    releases : mapping
        For each package concerned, the versions that have the fault ("" for all).
    files : mapping
        For each package, the files that the edit changes, below the source folder.
    edit : callable, optional
        From text and arguments to text; raises `AnchorMovedError`.
    every_file : bool
        Whether each of `files` must have the anchor; else one of them.
    flags : callable, optional
        The options that cure it without an edit, for a target.
    wanted : callable
        Whether a target's compilers complain.
    asked : bool
        Applied only when it is asked for by its id.
    guide : str
        What the guide says of it, and whether that holds.
    fault : str
        The entry of `anymamba.faults` that has this symptom.
    """

    id: str
    compiler: str
    says: str
    reason: str
    releases: Mapping[str, str]
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    edit: Callable[[str, Arguments], str] | None = None
    every_file: bool = True
    flags: Callable[[Target], Flags] | None = None
    wanted: Callable[[Target], bool] = lambda target: target.windows
    asked: bool = False
    guide: str = "not mentioned"
    fault: str = ""

    def applies_to(self, name: str, version: str) -> bool:
        """Return whether a release has the fault."""
        specifier = self.releases.get(name)
        return specifier is not None and SpecifierSet(specifier).contains(Version(version), prereleases=True)


@dataclass(frozen=True)
class Cure:
    """A rule and how it is applied: by flags, or (flags None) by its edit."""

    rule: Rule
    flags: Flags | None = None


@dataclass(frozen=True)
class Change:
    """A file before and after."""

    file: str
    before: str
    after: str


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule, in the order of their ids."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    rules = [importlib.import_module(f"{__name__}.{name}").RULE for name in names]
    return tuple(sorted(rules, key=lambda rule: str(rule.id)))


def rule(rule_id: str) -> Rule:
    """Return the rule of this id.

    Raises
    ------
    OptionError
    """
    found = next((one for one in all_rules() if one.id == rule_id), None)
    if found is None:
        raise OptionError(f"There is no rule {rule_id!r}.", next_step=f"one of {', '.join(r.id for r in all_rules())}")
    return found


def select(
    name: str,
    version: str,
    target: Target | None,
    *,
    asked: Collection[str] = (),
    without: Collection[str] = (),
) -> list[Cure]:
    """Choose the rules for a release, and how each cures.

    Parameters
    ----------
    name, version : str
    target : Target or None
        The compilers; flags are preferred to edits. None: nobody knows who will compile, so every edit that may be needed.
    asked : collection of str
        Rules that are applied only when asked for.
    without : collection of str
        Rules to leave out.

    Raises
    ------
    OptionError
        An unknown id.
    """
    for rule_id in (*asked, *without):
        rule(rule_id)
    cures = []
    for one in all_rules():
        if not one.applies_to(name, version) or one.id in without or (one.asked and one.id not in asked):
            continue
        if target is None:
            if one.edit is not None:
                cures.append(Cure(one))
        elif one.id in asked and one.edit is not None:
            cures.append(Cure(one))
        elif one.wanted(target):
            if one.flags is not None:
                cures.append(Cure(one, one.flags(target)))
            elif one.edit is not None:
                cures.append(Cure(one))
    return cures


def work_out(
    source: Path, name: str, version: str, rules: Sequence[Rule], arguments: Arguments | None = None
) -> tuple[list[Change], list[Applied]]:
    """Make the edits of `rules` in memory.

    Parameters
    ----------
    source : Path
        The top folder of upstream's sources; nothing is written.
    name, version : str
    rules : sequence of Rule
    arguments : mapping, optional

    Raises
    ------
    PatchError
        A file or an anchor is missing, or a rule stands there already with other arguments.
    """
    texts: dict[str, tuple[str, str]] = {}
    applied: list[Applied] = []
    for one in rules:
        if one.edit is None:
            continue
        outcomes = [
            _work_out(source, one, file, f"{name} {version}", texts, arguments or {}) for file in one.files[name]
        ]
        if missing := [why for _, why in outcomes if why]:
            newer = Version(version) > known_versions(name)[0]
            if not newer and (one.every_file or len(missing) == len(outcomes)):
                raise _moved(one, f"{name} {version}", missing[0])
        applied += [done for done, _ in outcomes if done is not None]
    return [Change(file, before, after) for file, (before, after) in texts.items() if before != after], applied


def write(source: Path, changes: Sequence[Change]) -> None:
    """Write the changed files."""
    for change in changes:
        path = source / change.file
        with path.with_name(f"{path.name}.new").open("w", encoding="utf-8", newline="") as file:
            file.write(change.after)
        path.with_name(f"{path.name}.new").replace(path)


def diff(changes: Sequence[Change], label: str) -> str:
    """Return a unified diff, as `patch -p1` reads it."""
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for change in changes
        for line in difflib.unified_diff(
            change.before.splitlines(keepends=True),
            change.after.splitlines(keepends=True),
            f"a/{change.file}",
            f"b/{change.file}",
            label,
            "patched by anymamba",
        )
    )


def _work_out(
    source: Path, one: Rule, file: str, release: str, texts: dict[str, tuple[str, str]], arguments: Arguments
) -> tuple[Applied | None, str]:
    """Return what was done, or why it could not be."""
    assert one.edit is not None
    if file not in texts:
        try:
            with (source / file).open(encoding="utf-8", newline="") as opened:
                text = opened.read()
        except FileNotFoundError:
            return None, f"There is no file {file}."
        except UnicodeDecodeError as error:
            return None, f"{file} is not UTF-8: {error}"
        texts[file] = (text, text)
    before, now = texts[file]
    comment = "#" if file.endswith((".py", ".toml")) else "//"
    marker = f"{comment} anymamba: {one.id}"
    given = "".join(f" {key}={value}" for key, value in sorted(arguments.items())) if one.asked else ""
    found = next((line.strip() for line in now.splitlines() if line.startswith(marker)), None)
    if found is not None:
        if found != marker + given:
            raise PatchError(
                f"Patch rule {one.id} was applied to {file} of {release} before, with other arguments.",
                why=f'It says "{found}", and "{marker}{given}" is wanted.',
                next_step="begin with fresh sources",
            )
        return Applied(one.id, file, "already there"), ""
    try:
        after = one.edit(now, arguments)
    except AnchorMovedError as error:
        return None, f"{file} has no {error}."
    texts[file] = (before, f"{after}{'' if after.endswith(chr(10)) or not after else chr(10)}{marker}{given}\n")
    return Applied(one.id, file, "edited"), ""


def _moved(one: Rule, release: str, why: str) -> PatchError:
    return PatchError(
        f"Patch rule {one.id} does not fit the sources of {release}.",
        why=f"{why} The rule is there because {one.reason[:1].lower()}{one.reason[1:]}",
        next_step=f"--without {one.id}, to go on without it; or fresh sources: anymamba source",
    )
