"""Turn upstream's patched package folder into a port: kernel modules become redirects, extensions become modules.

Upstream's kernel modules move to `<package>/_upstream/ops/...`, where they import one another; in their place stands a small
module whose names come from `anymamba.ops` first (`runtime`, `families`).
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import PatchError
from anymamba.upstream.patches import Applied, apply, rules_for
from anymamba.upstream.patches._originals import TRITON_OPTIONAL, own_imports
from anymamba.upstream.port.families import EXTENSIONS, KERNEL_FOLDERS
from anymamba.upstream.port.names import Names, read_names

__all__ = ["PORT_REVISION", "Port", "build_native", "build_port", "port_version", "write_extensions"]

PORT_REVISION = 1
"""N of `2.2.2+anymamba.N`: raised when what this module makes of the same source changes for users."""

KEPT = "_upstream"


@dataclass(frozen=True)
class Port:
    """A package folder made ready for a wheel.

    Attributes
    ----------
    folder : Path
        Holds the package's folder and the extension modules: the content of site-packages.
    applied : tuple of Applied
        What was done to which file.
    """

    folder: Path
    applied: tuple[Applied, ...]


def port_version(version: str) -> str:
    """Return the version that a port of this release has."""
    return f"{version}+anymamba.{PORT_REVISION}"


def build_port(source: Path, name: str, version: str, into: Path) -> Port:
    """Copy the package out of an unpacked source archive, patch it and redirect its kernels.

    Parameters
    ----------
    source : Path
        The archive's top folder.
    name, version : str
    into : Path
        An empty folder.

    Raises
    ------
    PatchError
    """
    if not (source / name / "__init__.py").is_file():
        raise PatchError(f"The source archive of {name} {version} has no folder {name} with an __init__.py.")
    package = into / name
    shutil.copytree(source / name, package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    applied = apply(package, name, version)
    applied += _redirect_kernels(package, name, version)
    applied += write_extensions(name, into)
    return Port(into, tuple(applied))


def write_extensions(name: str, into: Path) -> list[Applied]:
    """Write the modules that stand for a distribution's compiled extensions."""
    for extension in EXTENSIONS[name]:
        text = _EXTENSION.format(name=extension) + (_SERVES_FORKS if extension == "selective_scan_cuda" else "")
        (into / f"{extension}.py").write_text(text, encoding="utf-8", newline="\n")
    return [Applied("extension-module", f"../{extension}.py", "written") for extension in EXTENSIONS[name]]


def build_native(source: Path, name: str, version: str, into: Path, applied: tuple[Applied, ...]) -> Port:
    """Copy and repair the package for a wheel with upstream's own compiled extension in it.

    Its functions stay upstream's. Where there is no Triton, kernel modules become redirects as in a port: upstream's package
    could not be imported otherwise.

    Parameters
    ----------
    source, name, version, into
        As in `build_port`.
    applied : tuple of Applied
        What was done to the C++ and CUDA sources.

    Raises
    ------
    PatchError
    """
    if not (source / name / "__init__.py").is_file():
        raise PatchError(f"The sources of {name} {version} have no folder {name} with an __init__.py.")
    package = into / name
    shutil.copytree(source / name, package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    repairs = [rule for rule in rules_for(name, version) if not rule.id.startswith("rebind-")]
    done = apply(package, name, version, repairs)
    if importlib.util.find_spec("triton") is None:
        done += _redirect_kernels(package, name, version)
    return Port(into, (*applied, *done))


def _redirect_kernels(package: Path, name: str, version: str) -> list[Applied]:
    modules = [
        path
        for folder in KERNEL_FOLDERS
        for path in sorted((package / "ops" / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    if not modules:
        return []
    public = {_module_name(path, package.parent): path for path in modules}
    kept = {module: module.replace(f"{name}.", f"{name}.{KEPT}.", 1) for module in public}
    names = read_names(public)
    applied: list[Applied] = []
    for module, path in public.items():
        original = package / KEPT / path.relative_to(package)
        original.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, original)
        path.write_text(_redirect(module, kept[module], names[module]), encoding="utf-8", newline="\n")
        applied.append(Applied("redirect", path.relative_to(package).as_posix(), "written"))
    for folder in {package / KEPT, *(parent for parent in (package / KEPT).rglob("*") if parent.is_dir())}:
        (folder / "__init__.py").write_text(_KEPT_PACKAGE, encoding="utf-8", newline="\n")
    rules = [TRITON_OPTIONAL, own_imports(kept)]
    return applied + [
        Applied(done.rule, f"{KEPT}/{done.file}", done.outcome) for done in apply(package / KEPT, name, version, rules)
    ]


def _module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _redirect(module: str, kept: str, names: Names) -> str:
    def listed(items: Iterable[str]) -> str:
        return "".join(f"        {item},\n" for item in items)

    return _REDIRECT.format(
        module=module,
        kept=kept,
        defined=listed(f'"{name}"' for name in names.defined),
        plain=listed(f'"{name}"' for name in names.plain),
        imported=listed(f'"{name}": "{source}"' for name, source in names.imported.items()),
    )


_REDIRECT = '''\
"""Redirect written by anymamba: the names of {module}, from anymamba.ops where it has them.

Upstream's own module is kept as {kept}.
"""

from anymamba.upstream.port.runtime import Redirect as _Redirect

_redirect = _Redirect(
    __name__,
    original="{kept}",
    defined=(
{defined}    ),
    plain=(
{plain}    ),
    imported={{
{imported}    }},
)
globals().update(_redirect.ours())
__getattr__ = _redirect.get
__all__ = [name for name in _redirect.names() if not name.startswith("_")]


def __dir__():
    return sorted({{*globals(), *_redirect.names()}})
'''

_KEPT_PACKAGE = '"""Upstream\'s own kernel modules, moved here by anymamba; redirects stand in their old places."""\n'

_EXTENSION = '''\
"""Written by anymamba: the functions of the compiled extension {name}, over anymamba.ops."""

from anymamba.extensions.{name} import *  # noqa: F403
from anymamba.extensions.{name} import __all__  # noqa: F401
'''

_SERVES_FORKS = """
from anymamba.extensions._forks import serve_forks as _serve_forks

_serve_forks()  # a fork of mamba_ssm that runs on this module finds its Triton modules served where there is no Triton
"""
