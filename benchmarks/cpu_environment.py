"""The environment that `benchmarks/cpu.py` runs in: this Python's own packages, and the peers.

A virtual environment whose site-packages name this Python's after their own: PyTorch, numba and the rest are the very same, and
what the peers bring along touches nothing here. Made once, kept in anymamba's cache folder, made anew when the pins change.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from anymamba.machine.folders import cache_folder

__all__ = ["python_with_peers"]

PINS = Path(__file__).resolve().parent.parent / "constraints" / "benchmarks.txt"


def python_with_peers() -> Path:
    """Return the Python of the environment; make it if it is not there (a download of about 30 MB)."""
    pins = PINS.read_text(encoding="utf-8")
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    mark = hashlib.sha256("\n".join([pins, sys.version, *own]).encode()).hexdigest()[:12]
    folder = cache_folder() / "benchmarks" / f"peers-{mark}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "complete"
    if done.is_file():
        return python
    if folder.exists():  # a run before was interrupted
        shutil.rmtree(folder)
    print(f"Making an environment with the peers in {folder} ...", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True)
    asked = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (Path(asked.stdout.strip()) / "own.pth").write_text("\n".join(dict.fromkeys(own)) + "\n", encoding="utf-8")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(PINS)], check=True)
    done.write_text(pins, encoding="utf-8")
    return python
