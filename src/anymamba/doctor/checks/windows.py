"""Windows' own obstacles: short paths, code pages, names that compilers cannot read."""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine

_UTF8 = 65001
_PATH_LIMIT = 260
# The longest path below site-packages or a build folder in what we install and build, with a margin.
_DEEPEST = 140


def long_paths(machine: Machine) -> Result | None:
    """Paths over 260 characters are refused unless the registry allows them."""
    windows = machine.windows
    if windows is None:
        return None
    if windows.long_paths:
        return Result("long-paths", "Long paths", Status.OK, Way.BOTH, seen="enabled", wanted="enabled")
    longest = max(len(machine.folders.site_packages), len(machine.folders.temporary))
    tight = longest + _DEEPEST > _PATH_LIMIT
    return Result(
        "long-paths",
        "Long paths",
        Status.WARN if tight else Status.INFO,
        Way.BOTH,
        seen=f"disabled; the longest folder in use has {longest} characters",
        wanted="enabled, or short folders",
        why='files whose path passes 260 characters cannot be made: "No such file or directory"' if tight else "",
        fix=r"reg add HKLM\SYSTEM\CurrentControlSet\Control\FileSystem /v LongPathsEnabled /t REG_DWORD /d 1 /f"
        "    (as administrator)"
        if tight
        else "",
    )


def code_page(machine: Machine) -> Result | None:
    """Compilers answer in the ANSI code page; torch's build decodes them strictly."""
    windows = machine.windows
    if windows is None:
        return None
    foreign = windows.ansi_code_page not in (_UTF8, 1252)
    return Result(
        "code-page",
        "Code page",
        Status.WARN if foreign else Status.OK,
        Way.NATIVE,
        seen=f"ANSI {windows.ansi_code_page}, console {windows.oem_code_page}",
        wanted="compiler messages that Python can decode",
        why="localised cl.exe output breaks some torch versions' builds with UnicodeDecodeError" if foreign else "",
        fix="set VSLANG=1033    (English compiler messages, with the English language pack of Visual Studio)"
        if foreign
        else "",
    )


def ascii_folders(machine: Machine) -> Result | None:
    """User names in Chinese put non-ASCII letters into TEMP, where nvcc stumbles."""
    if machine.windows is None:
        return None
    odd = [folder for folder in (machine.folders.temporary, machine.python.prefix) if not folder.isascii()]
    if not odd:
        return None
    return Result(
        "ascii-folders",
        "Folder names",
        Status.WARN,
        Way.NATIVE,
        seen=", ".join(odd),
        wanted="ASCII letters only",
        why="nvcc and cl pass these paths through several code pages and may lose the file",
        fix=r"set TMP=C:\tmp & set TEMP=C:\tmp    (make the folder first; environments in C:\envs)",
    )
