"""What a user asks of a native build, in words of the command line: releases, rules, architectures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from packaging.version import InvalidVersion, Version

from anymamba.errors import OptionError
from anymamba.upstream.native.rules import rule
from anymamba.upstream.plan import exact_version, parse_requirements
from anymamba.upstream.releases import DEFAULTS, PACKAGES, known_versions, partner

__all__ = ["exact_release", "parse_architectures", "parse_rules", "releases"]


def exact_release(requirement: str) -> tuple[str, str]:
    """Return name and version of ``NAME==VERSION``; of a bare name, the guide's version.

    Raises
    ------
    OptionError
    """
    found = releases([requirement], partners=False)
    return next(iter(found.items()))


def releases(requirements: Sequence[str], *, partners: bool = True) -> dict[str, str]:
    """Return the version wanted of each package, in the order in which they are built.

    Nothing named: the guide's pair. A range gets the newest known release in it.

    Parameters
    ----------
    requirements : sequence of str
    partners : bool
        A mamba_ssm alone brings the causal_conv1d that goes with it.

    Raises
    ------
    OptionError
        Not a requirement of these packages, or no such release.
    """
    wanted = parse_requirements(requirements)
    found: dict[str, str] = {}
    for name, specifier in wanted.items():
        exact = exact_version(specifier)
        if exact is None and not len(specifier):
            exact = DEFAULTS[name]
        if exact is None:
            best = next((version for version in known_versions(name) if specifier.contains(version)), None)
            if best is None:
                raise OptionError(f"No known release is {name}{specifier}.", next_step=f"{name}=={DEFAULTS[name]}")
            exact = str(best)
        try:
            found[name] = str(Version(exact))
        except InvalidVersion as error:
            raise OptionError(f"{exact!r} is no version.", next_step=f"{name}=={DEFAULTS[name]}") from error
    if partners and "mamba_ssm" in found:
        found.setdefault("causal_conv1d", partner(found["mamba_ssm"]))
    return {name: found[name] for name in PACKAGES if name in found}


def parse_rules(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Return ids and arguments of rules asked for: ``bool-switch-static``, ``kernel-parameters,kNThreads=64``.

    Raises
    ------
    OptionError
    """
    ids: list[str] = []
    arguments: dict[str, int] = {}
    for text in texts:
        rule_id, *pairs = text.split(",")
        ids.append(rule(rule_id).id)
        for pair in pairs:
            key, _, value = pair.partition("=")
            if not value.isdecimal():
                raise OptionError(
                    f"{pair!r} is no argument of a rule.", next_step="--rule kernel-parameters,kNThreads=64"
                )
            arguments[key] = int(value)
    return ids, arguments


def parse_architectures(text: str) -> tuple[str, ...]:
    """Return the architectures of ``8.6,8.9`` (or ``8.6;8.9+PTX``, as torch writes them).

    Raises
    ------
    OptionError
    """
    found = tuple(part.strip() for part in re.split(r"[,; ]+", text) if part.strip())
    for part in found:
        if not re.fullmatch(r"\d{1,2}\.\d[af]?(\+PTX)?", part):
            raise OptionError(
                f"{part!r} is no GPU architecture.", next_step="--arch native, --arch all, or --arch 8.6,8.9"
            )
    if not found:
        raise OptionError("No GPU architecture was named.", next_step="--arch native, --arch all, or --arch 8.6,8.9")
    return found
