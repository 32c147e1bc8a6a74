"""Command line of the laboratory; see the package's docstring and docs/windows.md.

Exit codes: 0 done (or, for `test`, no wine to be had: a plain line says so, and the rest of CI goes on), 1 a test or a
step failed, 2 a wrong command line, 3 wine is missing and cannot be installed (`test` only with --require).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if not __package__:  # `python tools/windows_lab ...`: make it the same as `python -m tools.windows_lab ...`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.windows_lab.commands import main

# Ended from outside: leave as by Ctrl-C, so that what was started ends too.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sys.exit(main(sys.argv[1:]))
