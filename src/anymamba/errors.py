"""Every error that anymamba raises on purpose.

AnymambaError                       exit code
├── ArgumentError (ValueError)      2  an operator got a wrong argument; names it, what it is, what it must be
│   ├── ShapeError
│   ├── DtypeError (TypeError)
│   ├── DeviceError
│   └── OptionError
├── BackendError (RuntimeError)     3
│   ├── UnknownBackendError            no backend of that name
│   ├── BackendRefusedError            asked for by name, or none left, and it cannot do this call; says why
│   ├── KernelCompileError             NVRTC refused one of our kernels; carries its log
│   └── KernelLaunchError              the driver refused to load or launch one
├── MissingOperatorError            3  a name of upstream's that anymamba lacks and whose own compiler is absent
├── SourceError                     4  a source archive could not be had
│   ├── IndexUnreachableError
│   ├── NoSuchReleaseError
│   └── OfflineError
├── IntegrityError                  5  what was fetched is not what was asked for, or is unsafe to unpack
│   ├── HashMismatchError
│   └── UnsafeArchiveError
├── PatchError                      6  a patch rule found its anchor moved
├── InstallError                    7  the environment was left as it was before
│   ├── EnvironmentLockedError         another install is running
│   ├── NotWritableError
│   └── VerificationFailedError        installed, proved wrong, rolled back
└── MachineError                    8  this machine lacks something the command needs
    └── RankLostError (RuntimeError)   another process of a distributed run died, hangs, or does something else

An error carries what a handler needs: `what` happened, `why`, and `next_step`, a command or an edit to make.
"""

from __future__ import annotations


class AnymambaError(Exception):
    """Base of all errors raised on purpose.

    Parameters
    ----------
    what : str
        One sentence: what happened, with the value seen and the value wanted.
    why : str, optional
        The cause, when known.
    next_step : str, optional
        The next command to type or edit to make.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", next_step: str = "") -> None:
        self.what = what
        self.why = why
        self.next_step = next_step
        super().__init__(what, why, next_step)

    def __str__(self) -> str:
        """Say what happened, why, and what to do next, a line each."""
        lines = [self.what]
        if self.why:
            lines.append(f"Why: {self.why}")
        if self.next_step:
            lines.append(f"Next: {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments (worker processes send errors home)."""
        return (_rebuild, (type(self), self.what, self.why, self.next_step))


def _rebuild(kind: type[AnymambaError], what: str, why: str, next_step: str) -> AnymambaError:
    return kind(what, why=why, next_step=next_step)


class ArgumentError(AnymambaError, ValueError):
    exit_code = 2


class ShapeError(ArgumentError):
    pass


class DtypeError(ArgumentError, TypeError):
    pass


class DeviceError(ArgumentError):
    pass


class OptionError(ArgumentError):
    pass


class NonFiniteError(AnymambaError, FloatingPointError):
    """A tensor holds a NaN or an infinity; raised where `ANYMAMBA_CHECK_FINITE` asks for it."""


class BackendError(AnymambaError, RuntimeError):
    exit_code = 3


class UnknownBackendError(BackendError):
    pass


class BackendRefusedError(BackendError):
    pass


class KernelCompileError(BackendError):
    pass


class KernelLaunchError(BackendError):
    pass


class MissingOperatorError(AnymambaError, RuntimeError):
    exit_code = 3


class SourceError(AnymambaError):
    exit_code = 4


class IndexUnreachableError(SourceError):
    pass


class NoSuchReleaseError(SourceError):
    pass


class OfflineError(SourceError):
    pass


class IntegrityError(AnymambaError):
    exit_code = 5


class HashMismatchError(IntegrityError):
    pass


class UnsafeArchiveError(IntegrityError):
    pass


class PatchError(AnymambaError):
    exit_code = 6


class InstallError(AnymambaError):
    exit_code = 7


class EnvironmentLockedError(InstallError):
    pass


class NotWritableError(InstallError):
    pass


class VerificationFailedError(InstallError):
    pass


class MachineError(AnymambaError):
    exit_code = 8


class RankLostError(MachineError, RuntimeError):
    pass
