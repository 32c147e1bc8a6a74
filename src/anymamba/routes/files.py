"""Files as values: made from templates, shown, and written without ever overwriting unasked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from anymamba.errors import NotWritableError, OptionError

__all__ = ["File", "template", "write_files"]


@dataclass(frozen=True)
class File:
    """A file to write: its path below the chosen folder (with /), its text, whether it is a program."""

    path: str
    text: str
    executable: bool = False

    @property
    def raw(self) -> bytes:
        r"""The bytes to write: PowerShell scripts with \r\n and a byte order mark (Windows PowerShell needs both), else \n."""
        if self.path.endswith(".ps1"):
            return b"\xef\xbb\xbf" + self.text.replace("\n", "\r\n").encode("utf-8")
        return self.text.encode("utf-8")


def template(name: str, **values: str) -> str:
    """Return the template `name` with %%key%% replaced.

    A line that holds nothing but one placeholder disappears when its value is empty.

    Raises
    ------
    KeyError
        If the template asks for a value that was not given (a mistake of ours).
    """
    text = (resources.files("anymamba.routes") / "templates" / name).read_text(encoding="utf-8")
    text = re.sub(
        r"^%%(\w+)%%\n", lambda found: f"{values[found.group(1)]}\n" if values[found.group(1)] else "", text, flags=re.M
    )
    return re.sub(r"%%(\w+)%%", lambda found: values[found.group(1)], text)


def write_files(folder: Path, files: Sequence[File], *, overwrite: Callable[[Path], bool]) -> list[tuple[str, str]]:
    """Write files below `folder`.

    Parameters
    ----------
    folder : Path
    files : sequence of File
    overwrite : callable
        Asked for each file that is there with another content, before anything is written.

    Returns
    -------
    list of (path, what happened)
        "written", "unchanged", "replaced".

    Raises
    ------
    OptionError
        If a file is there and must not be overwritten; then nothing was written.
    NotWritableError
        If the folder cannot be written to.
    """
    done: list[tuple[str, str]] = []
    for file in files:
        path = folder / file.path
        if not path.exists():
            done.append((file.path, "written"))
        elif path.is_file() and path.read_bytes() == file.raw:
            done.append((file.path, "unchanged"))
        elif path.is_file() and overwrite(path):
            done.append((file.path, "replaced"))
        else:
            raise OptionError(
                f"{path} is there and has another content; nothing was written.",
                next_step="choose another folder with --to, or add --force",
            )
    for file, (_, what) in zip(files, done):
        if what != "unchanged":
            _write(folder / file.path, file)
    return done


def _write(path: Path, file: File) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".new")
        aside.write_bytes(file.raw)
        if file.executable:
            aside.chmod(0o755)
        aside.replace(path)
    except OSError as failure:
        raise NotWritableError(f"{path} cannot be written: {failure.strerror or failure}.") from failure
