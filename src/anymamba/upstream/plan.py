"""What an install would do, as a plain value: printed by `--dry-run`, saved, replayed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from anymamba import __version__
from anymamba.errors import InstallError, MachineError, NoSuchReleaseError, NotWritableError, OfflineError, OptionError
from anymamba.upstream.cache import cached_source, cached_versions, sha256_of
from anymamba.upstream.environment import Environment, Installed, inspect_environment
from anymamba.upstream.extras import EXTRAS, Extra, find_extra
from anymamba.upstream.index import Found, Index
from anymamba.upstream.patches import rules_for
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.port.build import port_version
from anymamba.upstream.releases import DEFAULTS, PACKAGES, known, known_versions, package_name, partner

__all__ = ["PackagePlan", "Plan", "check_environment", "exact_version", "make_plan", "parse_requirements"]

SCHEMA = 1


@dataclass(frozen=True)
class PackagePlan:
    """One package of a plan.

    Attributes
    ----------
    file : str
        The source archive; empty for an extra, which is written here (`anymamba.upstream.extras`).
    sha256 : str or None
        What the archive must be; None when nobody states it (then the archive is taken as it comes).
    hash_from : str
        "lock" (shipped with this product), "index", "cache", "bundle" or "nobody".
    size : int or None
        Bytes of the archive; None when only the index knows.
    cached : bool
        No download needed.
    rules : list of (id, reason)
    replaces : Installed or None
    """

    name: str
    version: str
    installs: str
    file: str
    size: int | None
    sha256: str | None
    hash_from: str
    cached: bool
    rules: list[tuple[str, str]]
    replaces: Installed | None


@dataclass(frozen=True)
class Plan:
    """An install, before anything is done.

    Attributes
    ----------
    bundle : str or None
        The folder that the wheels are taken from as they are, instead of being made from source archives.
    """

    product: str
    python: str
    site_packages: str
    torch: str
    offline: bool
    packages: list[PackagePlan]
    bundle: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, with its schema's number."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a saved plan."""
        data = json.loads(text)
        if data.pop("schema", None) != SCHEMA:
            raise OptionError(
                "This plan was saved by another version of anymamba.", next_step="anymamba install --dry-run"
            )
        packages = [
            PackagePlan(
                **{
                    **package,
                    "rules": [(rule[0], rule[1]) for rule in package["rules"]],
                    "replaces": Installed(**package["replaces"]) if package["replaces"] else None,
                }
            )
            for package in data.pop("packages")
        ]
        return Plan(**data, packages=packages)


def parse_requirements(texts: Iterable[str], latest: bool = False) -> dict[str, SpecifierSet]:
    """Turn what the user named into a version specifier for each package.

    Nothing named is the default pair, or with `latest` any pair. A specifier takes the newest release that it allows.

    Raises
    ------
    OptionError
        Not a requirement, or not a package that we port.
    """
    wanted: dict[str, SpecifierSet] = {}
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise OptionError(
                f"{text!r} is not a requirement.", why=str(error), next_step="anymamba install mamba_ssm==2.2.2"
            ) from error
        name = package_name(requirement.name)
        if name is None or requirement.url:
            raise OptionError(
                f"{text!r} names something other than a release of {' or '.join(PACKAGES)}.",
                next_step="anymamba install mamba_ssm==2.2.2 causal_conv1d==1.4.0",
            )
        wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
    if wanted:
        return wanted
    return {name: SpecifierSet("" if latest else f"=={version}") for name, version in DEFAULTS.items()}


def make_plan(
    requirements: Sequence[str],
    python: Path,
    offline: bool = False,
    index: Index | None = None,
    extras: Sequence[str] = (),
    latest: bool = False,
) -> Plan:
    """Work out what an install would do. Reads the network only for what neither lock file nor cache knows.

    Parameters
    ----------
    requirements : sequence of str
        Such as ``mamba_ssm==2.2.2``. A mamba_ssm without a causal_conv1d brings the one that fits it.
    python : Path
        The interpreter of the environment to install into.
    offline : bool
        Use the cache only.
    index : Index, optional
        Default: what that interpreter's pip is configured with.
    extras : sequence of str
        Keys of `EXTRAS`. With them and no requirements, packages that are there stay as they are.
    latest : bool
        Where nothing is named: the newest of both packages instead of the default pair.

    Raises
    ------
    OptionError, MachineError, NotWritableError, NoSuchReleaseError, OfflineError, IndexUnreachableError
    """
    wanted = parse_requirements(requirements, latest)
    chosen = [find_extra(word) for word in dict.fromkeys(extras)]
    environment = inspect_environment(python)
    check_environment(environment)
    if chosen and not requirements:
        replaced = {*environment.installed, *(extra.instead for extra in chosen)}
        wanted = {name: specifier for name, specifier in wanted.items() if name not in replaced}
    for extra in EXTRAS.values():
        _check_alternatives(extra, extra in chosen, wanted, environment)
    resolver = _Resolver(python, offline, index)
    packages: dict[str, PackagePlan] = {}
    if "mamba_ssm" in wanted:
        packages["mamba_ssm"] = resolver.plan("mamba_ssm", wanted["mamba_ssm"], environment)
        fitting = SpecifierSet(f"=={partner(packages['mamba_ssm'].version)}")
        wanted.setdefault("causal_conv1d", fitting)
    if "causal_conv1d" in wanted:
        packages["causal_conv1d"] = resolver.plan("causal_conv1d", wanted["causal_conv1d"], environment)
    return Plan(
        product=__version__,
        python=environment.python,
        site_packages=environment.purelib,
        torch=environment.torch or "",
        offline=offline,
        packages=[
            *(packages[name] for name in PACKAGES if name in packages),
            *(_extra(extra, environment) for extra in chosen),
        ],
    )


def _check_alternatives(extra: Extra, chosen: bool, wanted: Container[str], environment: Environment) -> None:
    """Refuse a port and the extra that stands in its place, of which one is there or both are asked for.

    Raises
    ------
    OptionError
    """
    if extra.instead is None:
        return
    port = environment.installed.get(extra.instead)
    if chosen and (extra.instead in wanted or (port is not None and port.kind == "port")):
        raise OptionError(
            f"The port of {extra.instead} and {extra.name} bring the same module: only one can be there.",
            why=f"{extra.name} is for a fork that is installed as {extra.instead}. Beside the port, a fork can stay a folder: "
            "it is used when that folder comes first on PYTHONPATH, and finds the port's module",
            next_step="anymamba uninstall, then install the fork, then anymamba install --with fork",
        )
    if extra.instead in wanted and extra.name in environment.installed:
        raise OptionError(
            f"{extra.name} is installed, for a fork of {extra.instead}; the port would take the fork's place.",
            next_step="anymamba uninstall, then the same command again",
        )


def _extra(extra: Extra, environment: Environment) -> PackagePlan:
    return PackagePlan(
        name=extra.name,
        version=extra.version,
        installs=port_version(extra.version),
        file="",
        size=None,
        sha256=None,
        hash_from="nobody",
        cached=True,
        rules=[("extension-module", extra.summary)],
        replaces=environment.installed.get(extra.name),
    )


def check_environment(environment: Environment) -> None:
    """Refuse an environment that cannot take a port, with the command that makes it one that can.

    Raises
    ------
    MachineError, NotWritableError, InstallError
    """
    python = f'"{environment.python}"'
    if environment.externally_managed:
        owner = "conda: it is the base environment" if environment.conda else "the operating system's package manager"
        make = "conda create -n mamba python pip" if environment.conda else f"{python} -m venv .venv"
        raise NotWritableError(
            f"{environment.python} belongs to {owner}.", next_step=f"{make}, then install torch and anymamba there"
        )
    if not environment.has_pip:
        raise MachineError(f"{environment.python} has no pip.", next_step=f"{python} -m ensurepip")
    if environment.torch is None:
        raise MachineError(
            f"torch is not installed for {environment.python}.",
            why="mamba_ssm needs it, and which build is right (CPU, CUDA 11.8, 12.x, ...) is your choice: anymamba never "
            "installs or changes torch.",
            next_step=f"{python} -m pip install torch",
        )
    if environment.anymamba is None:
        raise MachineError(
            f"anymamba is not installed for {environment.python}: the ports call it.",
            next_step=f"{python} -m pip install anymamba",
        )
    for name, there in environment.installed.items():
        if there.hides:
            raise InstallError(
                f"{name} {there.version} in {there.location} would hide whatever is installed in {environment.purelib}.",
                why="That folder is searched first: a --user installation, or PYTHONPATH.",
                next_step=f"{python} -m pip uninstall {name} (or take the folder out of PYTHONPATH)",
            )


class _Resolver:
    def __init__(self, python: Path, offline: bool, index: Index | None) -> None:
        self._python, self._offline, self._index = python, offline, index

    def plan(self, name: str, specifier: SpecifierSet, environment: Environment) -> PackagePlan:
        version, found = self._choose(name, specifier)
        release = known(name, version)
        sha256: str | None
        size: int | None
        if release is not None:
            file, size, sha256, hash_from = release.file, release.size, release.sha256, "lock"
        elif found is not None:
            file, size, sha256, hash_from = found.file, None, found.sha256, "index" if found.sha256 else "nobody"
        else:
            kept = cached_versions(name)[version]
            file, size, sha256, hash_from = kept.name, kept.stat().st_size, sha256_of(kept), "cache"
        cached = sha256 is not None and cached_source(sha256, file) is not None
        if self._offline and not cached:
            raise OfflineError(
                f"{file} is not in the cache, and may not be fetched.",
                next_step="the same command without --offline",
            )
        return PackagePlan(
            name=name,
            version=version,
            installs=port_version(version),
            file=file,
            size=size,
            sha256=sha256,
            hash_from=hash_from,
            cached=cached,
            rules=[(rule.id, rule.reason) for rule in rules_for(name, version)],
            replaces=environment.installed.get(name),
        )

    def _choose(self, name: str, specifier: SpecifierSet) -> tuple[str, Found | None]:
        exact = exact_version(specifier)
        if exact is not None and known(name, exact) is not None:
            return str(Version(exact)), None
        if self._offline:
            candidates = {Version(version): version for version in cached_versions(name)}
            best = _newest(candidates, specifier)
            if best is None:
                raise OfflineError(
                    f"No {name}{specifier} is in the cache.", next_step="the same command without --offline"
                )
            return str(best), None
        offers = {Version(found.version): found for found in self._ask().find(name)}
        best = _newest(
            {v: found for v, found in offers.items() if found.yanked is None or exact is not None}, specifier
        )
        if best is None:
            newest = ", ".join(str(version) for version in sorted({*offers, *known_versions(name)}, reverse=True)[:6])
            raise NoSuchReleaseError(
                f"There is no source archive of {name}{specifier}.",
                why=f"The newest that can be had: {newest}.",
                next_step=f"anymamba install {name}=={DEFAULTS[name]}",
            )
        return str(best), offers[best]

    def _ask(self) -> Index:
        if self._index is None:
            self._index = Index(read_pip_settings(self._python))
        return self._index


def exact_version(specifier: SpecifierSet) -> str | None:
    """Return the version of a specifier that allows only one, else None."""
    parts = list(specifier)
    if len(parts) == 1 and parts[0].operator in ("==", "===") and not parts[0].version.endswith(".*"):
        return parts[0].version
    return None


def _newest(candidates: dict[Version, Any], specifier: SpecifierSet) -> Version | None:
    fitting = [version for version in candidates if specifier.contains(version)]
    return max(fitting, default=None)
