"""From objects to a wheel: upstream's Python files with the general repairs, and the compiled extension beside them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from anymamba.upstream.native.recipe import Recipe
from anymamba.upstream.native.sources import Sources
from anymamba.upstream.native.tags import repository
from anymamba.upstream.patches import Applied
from anymamba.upstream.port.build import build_native
from anymamba.upstream.wheel import build_wheel

__all__ = ["pack"]


def pack(
    sources: Sources, recipe: Recipe, extension: Path, installs: str, tag: str, applied: Sequence[Applied], into: Path,
    details: dict[str, object],
) -> Path:  # fmt: skip
    """Make the wheel and return its path.

    Parameters
    ----------
    sources : Sources
    recipe : Recipe
    extension : Path
        The compiled module.
    installs : str
        The wheel's version.
    tag : str
        "cp311-cp311-linux_x86_64".
    applied : sequence of Applied
        What was done to the C++ and CUDA sources.
    into : Path
        An existing folder.
    details : dict
        For the provenance: compilers, flags, architectures.
    """
    folder = into / f"{sources.name}.files"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        package = build_native(sources.folder, sources.name, sources.version, folder, tuple(applied))
        shutil.copyfile(extension, folder / extension.name)
        if not (sources.folder / "PKG-INFO").is_file():
            _write_metadata(sources, recipe)
        return build_wheel(
            package, sources.folder, sources.name, sources.version,
            sha256=sources.identity.get("sha256", ""), file=sources.identity.get("file", ""), into=into,
            installs=installs, tag=tag, details={"identity": dict(sources.identity), **details},
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_metadata(sources: Sources, recipe: Recipe) -> None:
    """Give a git tree the headers that a source archive has."""
    lines = ["Metadata-Version: 2.1", f"Name: {sources.name}", f"Version: {sources.version}",
             f"Home-page: {repository(sources.name)}"]  # fmt: skip
    lines += [f"Requires-Dist: {requirement}" for requirement in recipe.requirements]
    (sources.folder / "PKG-INFO").write_text("\n".join(lines) + "\n\n", encoding="utf-8", newline="\n")
