"""How a command ends: exit codes and the last words on the terminal.

0 done; 1 a check failed; 2 wrong arguments; 3 no backend can do it; 4 a source could not be had; 5 a download or archive is
not what it must be; 6 a patch rule no longer fits; 7 the environment could not be changed (and was not); 8 this machine
lacks something; 130 Ctrl-C. The codes 2-8 are those of `anymamba.errors`.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer

from anymamba.cli.terminal import terminal
from anymamba.errors import AnymambaError

INTERRUPTED = 130

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


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
        _stopped()
        sys.exit(INTERRUPTED)


def interruptible(command: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Wrap a command so that Ctrl-C ends in our words and code: typer keeps a KeyboardInterrupt to itself."""

    @functools.wraps(command)
    def wrapped(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            _stopped()
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def _stopped() -> None:
    terminal().note("Stopped; nothing was left half done.")


def _explained(trace: str) -> bool:
    from anymamba.faults import brief

    known = brief(trace)
    if known is None:
        return False
    terminal().err.file.write(trace + "\n")
    terminal().error(AnymambaError(known.what, why=known.why, next_step=known.next_step))
    return True
