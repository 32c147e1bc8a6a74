"""How a command ends: exit codes and the last words on the terminal.

0 done; 1 a check failed; 2 wrong arguments; 3 no backend can do it; 4 a source could not be had; 5 a download or archive is
not what it must be; 6 a patch rule no longer fits; 7 the environment could not be changed (and was not); 8 this machine
lacks something; 130 Ctrl-C. The codes 2-8 are those of `anymamba.errors`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from anymamba.cli.terminal import terminal
from anymamba.errors import AnymambaError

INTERRUPTED = 130


@contextmanager
def exit_with_errors_explained() -> Iterator[None]:
    """Turn a deliberate error into a message on stderr and its exit code; leave bugs their traceback.

    A traceback that shows a known fault of this machine (a torch that cannot load, say) is explained below it.
    """
    try:
        yield
    except AnymambaError as error:
        terminal().error(error)
        sys.exit(error.exit_code)
    except Exception:
        if not _explained(traceback.format_exc()):
            raise
        sys.exit(1)
    except KeyboardInterrupt:
        terminal().note("Stopped; nothing was left half done.")
        sys.exit(INTERRUPTED)


def _explained(trace: str) -> bool:
    from anymamba.faults import brief

    known = brief(trace)
    if known is None:
        return False
    terminal().err.file.write(trace + "\n")
    terminal().error(AnymambaError(known.what, why=known.why, next_step=known.next_step))
    return True
