"""The commands: setup, test, shell, dev, capture, compile, clean, lock."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.windows_lab import checkout, choice, junit, lock, prepare, product, runner, suite, wine
from tools.windows_lab.compile import command as compiling
from tools.windows_lab.compile import trees
from tools.windows_lab.compile.record import RESULTS, Record
from tools.windows_lab.interpreters import INTERPRETERS
from tools.windows_lab.layout import FOLDER_VARIABLE, REPOSITORY, Layout, default_root
from tools.windows_lab.say import say
from tools.windows_lab.turns import Turn

LEAST_MINUTES = 3.0  # of tests, however long making the laboratory ready took
DONE, FAILED, USAGE, NO_WINE, STOPPED = 0, 1, 2, 3, 130
VERSIONS = tuple(i.version for i in INTERPRETERS)
CAPTURE = REPOSITORY / "benchmarks" / "results" / "windows-install.txt"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.windows_lab",
        description="Run the product in Windows Pythons under wine.",
        epilog=f"The laboratory lies in {default_root()}; {FOLDER_VARIABLE} names another folder. "
        "Exit codes: 0 done, 1 failed, 2 usage, 3 no wine to be had (`test` exits 0 then, unless --require).",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    setup = commands.add_parser("setup", help="make the laboratory ready (does only what is not done)")
    test = commands.add_parser("test", help="run the test-suite in the Windows Pythons; sets up first")
    shell = commands.add_parser("shell", help="a Windows prompt in the laboratory, or one command: shell -- python -V")
    clean = commands.add_parser("clean", help="remove the laboratory")
    commands.add_parser("lock", help="write the lock files anew from pyproject.toml (needs uv)")

    dev = commands.add_parser("dev", help="dev.py in a Windows Python, on a copy of this checkout: dev demo")
    dev.add_argument("words", nargs="+", metavar="WORD", help="demo, or -- test --no-lint ...")
    dev.add_argument("--timeout", type=float, default=7200.0, metavar="SECONDS", help="for all of it (default 7200)")
    capture = commands.add_parser("capture", help="write down what `anymamba install` shows there, for docs/windows.md")
    capture.add_argument(
        "--to", type=Path, default=CAPTURE, metavar="FILE", help="default benchmarks/results/windows-install.txt"
    )
    capture.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="a step (default 1800)")

    real = commands.add_parser(
        "compile", help="upstream's sources with real cl.exe and nvcc.exe, by the product's commands"
    )
    real.add_argument(
        "--msvc", type=Path, required=True, metavar="DIR",
        help="a folder with Microsoft's compiler and a Windows SDK, which you have; its licence is yours to accept",
    )  # fmt: skip
    real.add_argument("--nvcc", type=Path, metavar="DIR", help="a CUDA toolkit of Windows, instead of NVIDIA's wheels")
    real.add_argument(
        "--source", action="append", default=[], metavar="NAME==VERSION=DIR",
        help="sources of a release that the package index has none of (again for another)",
    )  # fmt: skip
    real.add_argument("--only", default="", metavar="EXPRESSION", help="only builds such as mamba_ssm-2.2.2-guide")
    real.add_argument("--minutes", type=float, metavar="N", help="begin nothing after so long; the next call goes on")
    real.add_argument(
        "--quick", action="store_const", dest="mode", const=compiling.DEBUG, default=compiling.WHOLE,
        help="device code without optimisation (-G), and noted as such",
    )  # fmt: skip
    real.add_argument(
        "--ptx", action="store_const", dest="mode", const=compiling.PTX,
        help="nor assembled for a card: all but ptxas, which takes longest; noted as such",
    )  # fmt: skip
    real.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where it is recorded")

    for command in (setup, test, shell, dev, capture):
        command.add_argument("--python", action="append", choices=VERSIONS, help="only this Windows Python")
    test.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as pytest's -k")
    test.add_argument(
        "--linux-junit", type=Path, metavar="FILE", help="result file of a run on this machine, to compare"
    )
    test.add_argument("--run-linux", action="store_true", help="run the suite on this machine too")
    test.add_argument(
        "--record", type=Path, metavar="FILE", help="note counts and skips in this JSON file, for the documents"
    )
    test.add_argument(
        "--by-dev", action="store_true", help="as `dev.py test --bare` does, in an environment it makes, on a copy"
    )
    test.add_argument("--require", action="store_true", help="without wine, exit 3 instead of 0")
    test.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for all of it (default 1800)")
    test.add_argument(
        "--minutes", type=float, metavar="N",
        help="begin no test later than that after the start; the tests named come first, then the cheapest of the rest",
    )  # fmt: skip
    test.add_argument("--one-by-one", action="store_true", help="one Windows Python after the other")
    test.add_argument("-v", "--verbose", action="store_true", help="pytest's whole output here")
    test.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="more for pytest, after --")
    shell.add_argument("words", nargs="*", metavar="WORD", help="a Windows command line, after --")
    clean.add_argument("--keep-downloads", action="store_true", help="keep the downloaded wheels")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run a command of the laboratory; its exit code."""
    if threading.current_thread() is not threading.main_thread():
        return _run(arguments)
    # Threads wait for the runs, and would do so to their end: what they wait for is ended first.
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _run(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(arguments: Sequence[str]) -> int:
    chosen = _parser().parse_args(list(arguments))
    chosen.started = time.monotonic()
    layout = Layout(default_root())
    try:
        if chosen.command == "lock":
            lock.lock_all()
            return DONE
        if chosen.command == "clean":
            return _clean(layout, chosen.keep_downloads)
        if chosen.command == "compile":
            microsoft, sources = trees.find_microsoft(chosen.msvc.resolve()), compiling.parse_sources(chosen.source)
            with prepare.ready(layout, VERSIONS) as found:
                fine = compiling.compile_all(
                    found, microsoft, Record(chosen.results), nvcc=chosen.nvcc and chosen.nvcc.resolve(),
                    sources=sources, only=chosen.only, minutes=chosen.minutes, mode=chosen.mode,
                )  # fmt: skip
            return DONE if fine else FAILED
        versions = tuple(chosen.python or VERSIONS)
        if chosen.command == "shell":
            with prepare.ready(layout, versions[-1:]) as found:
                return _shell(found, versions[-1], chosen.words)
        if chosen.command == "dev":
            with prepare.ready(layout, versions[-1:], install_product=False) as found:
                outcome = checkout.dev(found, versions[-1], list(chosen.words), timeout=chosen.timeout)
                if outcome.timed_out:
                    say(f"stopped after {outcome.seconds:.0f} s; --timeout allows more")
                return DONE if outcome.ok else FAILED
        if chosen.command == "capture":
            with prepare.ready(layout, versions[:1], install_product=False) as found:
                text = checkout.capture_install(found, versions[0], timeout=chosen.timeout)
            chosen.to.write_text(text, encoding="utf-8", newline="\n")
            say(f"written: {chosen.to}; `python benchmarks/summarise.py` puts it into docs/windows.md")
            return DONE
        if chosen.command == "setup":
            with prepare.ready(layout, versions):
                return DONE
        with prepare.ready(layout, versions, install_product=not chosen.by_dev) as found:
            return _test(found, versions, chosen)
    except wine.WineMissingError as error:
        say(f"not run: {error}")
        return NO_WINE if chosen.command != "test" or chosen.require else DONE
    except trees.TreeError as error:
        say(str(error))
        return USAGE
    except KeyboardInterrupt:
        runner.stop_all()
        say("stopped")
        return STOPPED
    except (runner.CommandError, OSError) as error:
        say(f"failed: {error}")
        return FAILED


def _stop(number: int, frame: object) -> None:
    runner.stop_all()
    raise KeyboardInterrupt


def _test(found: wine.Wine, versions: tuple[str, ...], chosen: argparse.Namespace) -> int:
    layout = found.layout
    start = time.monotonic()
    commit = _commit()  # now: a working tree goes on while a copy of it is tested
    words = ["-k", chosen.k] if chosen.k else []
    if chosen.minutes is None:
        words += chosen.pytest
    else:
        left = chosen.minutes - (start - chosen.started) / 60  # making the laboratory ready counts
        words += [f"--minutes={max(left, LEAST_MINUTES):.2f}", *choice.ordered(chosen.pytest)]

    def one(version: str) -> suite.Result:
        left = max(30.0, chosen.timeout - (time.monotonic() - start))
        return suite.run(found, version, words, timeout=left, verbose=chosen.verbose, by_dev=chosen.by_dev)

    results: dict[str, suite.Result | None] = {"Linux": None}
    if chosen.run_linux:
        results["Linux"] = suite.run_here(layout, words, timeout=chosen.timeout, verbose=chosen.verbose)
    # Two cores and much waiting for the disk: side by side is a third quicker than one after the other.
    with ThreadPoolExecutor(max_workers=1 if chosen.one_by_one else len(versions)) as pool:
        for version, result in zip(versions, pool.map(one, versions)):
            results[f"Windows {version}"] = result
    columns = {name: result.counts if result else None for name, result in results.items()}
    if chosen.linux_junit is not None:
        columns["Linux"] = junit.read(chosen.linux_junit)
    if chosen.record is not None:
        how = "python dev.py test --bare" if chosen.by_dev else "python -m pytest"
        about = {"commit": commit, "command": f"{how}, hypothesis profile brief on Windows"}
        chosen.record.write_text(junit.document(columns, about), encoding="utf-8", newline="\n")
    for text in (junit.table(columns), *suite.complaints(results)):
        sys.stdout.write(text + "\n")
    bad = [name for name, result in results.items() if result is not None and not result.ok]
    say(f"{time.monotonic() - start:.0f} s in all; " + (f"FAILED on {', '.join(bad)}" if bad else "all passed"))
    return FAILED if bad else DONE


def _commit() -> str:
    """What ran: the commit, and whether files differ from it; empty outside a clone."""
    said = runner.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], cwd=REPOSITORY, timeout=60
    )
    return said.output.strip() if said.ok else ""


def _shell(found: wine.Wine, version: str, words: Sequence[str]) -> int:
    environment = product.environment(found, version)
    command = found.command(*words) if words else found.command("cmd")
    if words or not (sys.stdin.isatty() and sys.stdout.isatty()):
        # Through a pipe: a Windows Python dies when its stdout is a regular file.
        outcome = runner.run(command, environment=environment, cwd=Path.cwd(), timeout=3600, on_text=_forward)
        return outcome.returncode
    return subprocess.run(command, env=environment, cwd=REPOSITORY, check=False).returncode


def _forward(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _clean(layout: Layout, keep_downloads: bool) -> int:
    with Turn(layout) as turn:
        turn.alone()
        found = wine.find(layout)
        if found is not None:
            found.stop_server()
        suite.clean(layout, keep_downloads)
    say(f"removed {layout.root}" + (" except its downloads" if keep_downloads else ""))
    return DONE
