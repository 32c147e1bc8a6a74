"""Every release of mamba_ssm with every release of causal_conv1d: ported, imported module by module, and checked by numbers.

    python -m tools.version_matrix                 all pairs; writes benchmarks/results/versions.md
    python -m tools.version_matrix --mamba 2.2.2 --conv 1.4.0 --conv 1.7.0 --out -

Sources come from the user's own index (pip's configuration) or the cache. Each port is made once and unpacked into a folder;
one process for each mamba_ssm takes its partners in turn, and for each pair
  imports every public module of both packages (nothing may fail but what needs another package that is not here),
  compares selective_scan_fn and causal_conv1d_fn with upstream's own reference functions of that very release,
  runs the guide's script forward and backward (Mamba; Mamba2 where the release has it),
  uses every name of upstream's kernel modules: what we lack must say so by name when called.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from anymamba import __version__
from anymamba.upstream.cache import cached_source
from anymamba.upstream.index import Index
from anymamba.upstream.making import make_wheel
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.port.build import KEPT
from anymamba.upstream.progress import Silent
from anymamba.upstream.releases import known, known_versions, partner

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.md"
PREFIX = "pair:"
TOLERANCE = 2e-5
"""Of the largest difference, relative to the largest value, float32."""


@dataclass
class Pair:
    """What a pair of releases did. `failed` is empty when everything held."""

    mamba_ssm: str
    causal_conv1d: str
    modules: int = 0
    left_out: dict[str, str] = field(default_factory=dict)  # module: the package that it needs and that is not here
    names: int = 0
    refused: list[str] = field(default_factory=list)
    scan_error: float = -1.0
    convolution_error: float = -1.0
    guide: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def make_ports(wanted: dict[str, Sequence[str]], into: Path) -> dict[str, dict[str, Path]]:
    """Port releases and unpack each into a folder of its own; return the folders by package and version."""
    made: dict[str, dict[str, Path]] = {name: {} for name in wanted}
    with Index(read_pip_settings(Path(sys.executable))) as index:
        for name, versions in wanted.items():
            for version in versions:
                release = known(name, version)
                assert release is not None, f"{name} {version} is not in lock.toml"
                archive = cached_source(release.sha256, release.file)
                if archive is None:
                    found = next(found for found in index.find(name) if found.file == release.file)
                    archive = index.download(found, release.sha256, Silent())
                wheel = make_wheel(name, version, release.sha256, archive, into / "made" / name / version)
                made[name][version] = into / name / version
                with zipfile.ZipFile(wheel) as zipped:
                    zipped.extractall(made[name][version])
    return made


def run_matrix(mamba: Sequence[str], conv: Sequence[str]) -> list[Pair]:
    """Run every pair of two lists of releases."""
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="matrix 矩阵 ", ignore_cleanup_errors=True) as folder:
        made = make_ports({"mamba_ssm": mamba, "causal_conv1d": conv}, Path(folder))
        partners = [f"{version}={path}" for version, path in made["causal_conv1d"].items()]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "ANYMAMBA_BACKEND": "torch", "PYTHONUTF8": "1"}
        for version, path in made["mamba_ssm"].items():
            done = subprocess.run(
                [sys.executable, "-m", "tools.version_matrix", "--probe", f"{version}={path}", *partners],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
            found = [Pair(**json.loads(line.removeprefix(PREFIX))) for line in lines]
            pairs += found
            for missing in set(conv) - {pair.causal_conv1d for pair in found}:
                pairs.append(Pair(version, missing, failed=[f"the process died: {done.stderr.strip()[-300:]}"]))
            good = sum(not pair.failed for pair in found)
            print(f"mamba_ssm {version}: {good} of {len(conv)} partners", file=sys.stderr, flush=True)
    return pairs


# --- in a process of its own


def probe(mamba: str, partners: Sequence[str]) -> None:
    """Take each partner in turn and print a line for each pair."""
    version, path = mamba.split("=", 1)
    plain = list(sys.path)
    for text in partners:
        conv, conv_path = text.split("=", 1)
        for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
            del sys.modules[name]
        sys.path[:] = [path, conv_path, *plain]
        importlib.invalidate_caches()
        pair = Pair(version, conv)
        started = time.perf_counter()
        for check in (_imports, _scan, _convolution, _guide, _names):
            try:
                check(pair, Path(path), Path(conv_path))
            except Exception as error:  # whatever foreign code raises is the finding
                pair.failed.append(f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")
        pair.seconds = round(time.perf_counter() - started, 2)
        print(PREFIX + json.dumps(asdict(pair)), flush=True)


_OURS = {"mamba_ssm", "causal_conv1d", "selective_scan_cuda", "causal_conv1d_cuda"}


def _modules(*roots: Path) -> Iterable[str]:
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if KEPT in parts:  # nobody's to import
                continue
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(pair: Pair, mamba: Path, conv: Path) -> None:
    for name in _modules(mamba, conv):
        try:
            importlib.import_module(name)
            pair.modules += 1
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in {*_OURS, "anymamba", ""}:
                raise
            pair.left_out[name] = error.name or ""


def _error(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _scan(pair: Pair, *_: Path) -> None:
    import torch

    interface = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    torch.manual_seed(0)
    u, delta, z = (torch.randn(2, 6, 37) for _ in range(3))
    A, B, C, D = -torch.rand(6, 4), torch.randn(2, 4, 37), torch.randn(2, 4, 37), torch.randn(6)
    ours, theirs = (
        function(u, delta, A, B, C, D=D, z=z, delta_bias=torch.randn(6).fill_(0.1), delta_softplus=True)
        for function in (interface.selective_scan_fn, interface.selective_scan_ref)
    )
    pair.scan_error = _error(ours, theirs)
    assert pair.scan_error < TOLERANCE, f"selective_scan_fn is {pair.scan_error:.1e} from selective_scan_ref"


def _convolution(pair: Pair, *_: Path) -> None:
    import torch

    package = importlib.import_module("causal_conv1d")
    interface = importlib.import_module("causal_conv1d.causal_conv1d_interface")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 6, 37), torch.randn(6, 4), torch.randn(6)
    ours = package.causal_conv1d_fn(x, weight, bias, activation="silu")
    pair.convolution_error = _error(ours, interface.causal_conv1d_ref(x, weight, bias, activation="silu"))
    assert pair.convolution_error < TOLERANCE, f"causal_conv1d_fn is {pair.convolution_error:.1e} from its reference"


def _guide(pair: Pair, *_: Path) -> None:
    import torch

    package = importlib.import_module("mamba_ssm")
    layers = {"Mamba": {"d_model": 16, "d_state": 16, "d_conv": 4, "expand": 2}}
    if hasattr(package, "Mamba2"):
        layers["Mamba2"] = {"d_model": 16, "d_state": 16, "headdim": 8, "chunk_size": 32}
    for name, options in layers.items():
        layer, x = getattr(package, name)(**options), torch.randn(2, 64, 16)
        y = layer(x)
        assert y.shape == x.shape and bool(torch.isfinite(y).all()), name
        y.sum().backward()
        bad = [part for part, p in layer.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]
        assert not bad, f"{name}: no finite gradient for {bad}"
        pair.guide.append(name)


def _names(pair: Pair, mamba: Path, _: Path) -> None:
    from anymamba.errors import MissingOperatorError
    from anymamba.upstream.port.runtime import Missing

    for name in _modules(mamba):
        module: ModuleType | None = sys.modules.get(name)
        redirect = getattr(module, "_redirect", None)
        for word in redirect.names() if redirect is not None else ():
            pair.names += 1
            value = getattr(module, word)
            if isinstance(value, Missing):
                pair.refused.append(f"{name}.{word}")
                said = ""
                try:
                    value()
                except MissingOperatorError as error:
                    said = error.what
                assert f".{word} cannot run here" in said, f"{name}.{word} was called and said {said!r}"


# --- the tables


def report(pairs: Sequence[Pair]) -> str:
    """Return the tables as Markdown."""
    import torch

    mamba = list(dict.fromkeys(pair.mamba_ssm for pair in pairs))
    conv = list(dict.fromkeys(pair.causal_conv1d for pair in pairs))
    at = {(pair.mamba_ssm, pair.causal_conv1d): pair for pair in pairs}
    good = sum(not pair.failed for pair in pairs)
    lines = [
        "# Versions",
        "",
        f"Written by `python -m tools.version_matrix`: anymamba {__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}, CPU. "
        f"**{good} of {len(pairs)} pairs** hold in every check.",
        "",
        "Each row is a mamba_ssm with the causal_conv1d that `anymamba install` chooses for it (or the newest tried). Modules: "
        "imported, of both packages; what needs another package that is not here is named. Errors: against upstream's own "
        "reference functions of that release, relative, float32. Names: of upstream's kernel modules; refused: those that we "
        "lack where Triton is absent, each says so by name when called.",
        "",
        "| mamba_ssm | causal_conv1d | modules | need another package | scan | convolution | guide | names | refused "
        "| partners |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for version in mamba:
        chosen = partner(version) if partner(version) in conv else conv[0]
        pair = at[version, chosen]
        partners = sum(not at[version, other].failed for other in conv)
        needs = ", ".join(sorted(set(pair.left_out.values()))) or "-"
        lines.append(
            f"| {version} | {chosen} | {pair.modules} | {needs} | {pair.scan_error:.0e} | {pair.convolution_error:.0e} "
            f"| {', '.join(pair.guide)} | {pair.names} | {len(pair.refused)} | {partners} of {len(conv)} |"
        )
    lines += [
        "",
        "Every pair (`+` holds in every check):",
        "",
        f"| | {' | '.join(conv)} |",
        "|---|" + "---|" * len(conv),
    ]
    for version in mamba:
        cells = ["+" if not at[version, other].failed else "FAILED" for other in conv]
        lines.append(f"| {version} | {' | '.join(cells)} |")
    failed = [pair for pair in pairs if pair.failed]
    lines += ["", *(f"- {p.mamba_ssm} with {p.causal_conv1d}: {'; '.join(p.failed)}" for p in failed)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Parse the arguments, run, write; return 1 when a pair failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mamba", action="append", help="a mamba_ssm release (again for another); default all")
    parser.add_argument("--conv", action="append", help="a causal_conv1d release (again for another); default all")
    parser.add_argument("--out", default=str(RESULTS), help="where the tables go; - prints them (default: %(default)s)")
    parser.add_argument("--probe", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        probe(arguments.probe[0], arguments.probe[1:])
        return 0
    pairs = run_matrix(
        arguments.mamba or [str(version) for version in known_versions("mamba_ssm")],
        arguments.conv or [str(version) for version in known_versions("causal_conv1d")],
    )
    text = report(pairs)
    if arguments.out == "-":
        sys.stdout.write(text)
    else:
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.out).write_text(text, encoding="utf-8", newline="\n")
    return 1 if any(pair.failed for pair in pairs) else 0


if __name__ == "__main__":
    sys.exit(main())
