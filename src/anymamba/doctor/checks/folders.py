"""Folders and variables: HOME, the kernel cache, disk space, a place to install to."""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.machine import Machine


def home_variable(machine: Machine) -> Result:
    """HOME: Windows does not set it, and Triton 2.0 dies without ("KeyError: 'HOME'")."""
    folders, triton = machine.folders, machine.triton
    if folders.home_variable:
        return Result("home-variable", "HOME", Status.OK, Way.BOTH, seen=folders.home_variable, wanted="set")
    if folders.home is None:
        return Result(
            "home-variable",
            "HOME",
            Status.WARN,
            Way.BOTH,
            seen="not set, and there is no home folder",
            wanted="a folder that can be written to",
            why="caches have no place to go",
            fix=for_system(machine, windows="setx HOME %TEMP%", linux="export HOME=/tmp"),
        )
    old_triton = triton is not None and triton.version.startswith(("2.0", "1."))
    return Result(
        "home-variable",
        "HOME",
        Status.WARN if old_triton else Status.INFO,
        Way.BOTH,
        seen=f"not set (home folder: {folders.home}); the port sets it when it is imported",
        wanted="set, for programs that run Triton 2.0 without the port",
        why="Triton 2.0 reads HOME and stops with KeyError: 'HOME'" if old_triton else "",
        fix=for_system(machine, windows="setx HOME %USERPROFILE%", linux="export HOME=~") if old_triton else "",
    )


def cache_folder(machine: Machine) -> Result:
    """Where compiled kernels and downloads are kept."""
    folders = machine.folders
    if not folders.cache_writable:
        return Result(
            "cache-folder",
            "Cache folder",
            Status.WARN,
            Way.PORT,
            seen=f"{folders.cache} cannot be written to",
            wanted="a folder that can be written to",
            why="kernels are compiled again in every process",
            fix=for_system(
                machine,
                windows=r"setx ANYMAMBA_CACHE_DIR %TEMP%\anymamba",
                linux="export ANYMAMBA_CACHE_DIR=/tmp/anymamba-$USER",
            ),
        )
    return Result("cache-folder", "Cache folder", Status.OK, Way.PORT, seen=folders.cache, wanted="writable")


def disk_space(machine: Machine) -> Result | None:
    """Room for downloads (port) and object files (native)."""
    places = (
        (machine.folders.cache, machine.folders.cache_free_gb, 0.5, Way.PORT),
        (machine.folders.temporary, machine.folders.temporary_free_gb, 5.0, Way.NATIVE),
    )
    for place, free, needed, way in places:
        if free is not None and free < needed:
            return Result(
                "disk-space",
                "Free disk",
                Status.WARN,
                way,
                seen=f"{free:g} GB at {place}",
                wanted=f"{needed:g} GB",
                why="downloads and object files go there",
                fix=for_system(
                    machine, windows=r"setx TMP D:\tmp & setx TEMP D:\tmp", linux="export TMPDIR=/path/with/space"
                )
                if way is Way.NATIVE
                else "set ANYMAMBA_CACHE_DIR to a folder on another disk",
            )
    return None


def place_to_install(machine: Machine) -> Result | None:
    """site-packages that we may write to."""
    if machine.folders.site_packages_writable:
        return None
    return Result(
        "place-to-install",
        "site-packages",
        Status.FAIL,
        Way.BOTH,
        seen=f"{machine.folders.site_packages} cannot be written to",
        wanted="writable",
        why="the packages are installed there",
        fix=for_system(
            machine,
            windows=r"py -3 -m venv --system-site-packages .venv & .venv\Scripts\activate",
            linux="python3 -m venv --system-site-packages .venv && . .venv/bin/activate",
        ),
    )
