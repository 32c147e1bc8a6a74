"""Taking names and secrets out of a text before it goes to a stranger.

Removed: home folders and user names (also escaped, with either slash, in WSL's and Git Bash's spelling), the machine's name,
addresses with a password, tokens by their known shapes, values of variables whose names speak of secrets, e-mail and IP
addresses. What is removed is replaced by a word that says what it was, so the text still reads.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["scrub"]

_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_SECRET_WORD = r"(?:secret|passw(?:or)?d|api[_\-]?key|access[_\-]?key|credential)"
_SHAPES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "PRIVATE KEY"),
        # scheme://user:password@host
        (r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)[^\s/@'\"]+@", r"\g<scheme>CREDENTIALS@"),
        # tokens of GitHub, Hugging Face, PyPI, GitLab, OpenAI, AWS, Slack; JSON web tokens
        (
            r"\b(?:gh[pousr]_[a-z0-9]{20,}|github_pat_\w{20,}|hf_[a-z0-9]{20,}|pypi-[\w\-]{20,}|glpat-[\w\-]{15,})",
            "TOKEN",
        ),
        (r"\b(?:sk-[\w\-]{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w\-]{10,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+)", "TOKEN"),
        # NAME_TOKEN=value, "password": "value", --password value, Authorization: value
        (rf"(?P<name>\b[\w\-]*{_SECRET_WORD}[\w\-]*['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,;]+", r"\g<name>SECRET"),
        # token=value, HF_TOKEN: value; not tokenizer = ..., not max_tokens = ...
        (r"(?P<name>\b(?:\w*[_\-])?token['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,;]+", r"\g<name>SECRET"),
        (r"(?P<name>--(?:password|token|api-key)\s+)\S+", r"\g<name>SECRET"),
        (r"(?P<name>\bAuthorization:\s*)[^\r\n]+", r"\g<name>SECRET"),
        (r"(?<![\w.+\-])(?!CREDENTIALS@)[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+", "EMAIL"),
        # C:\Users\x, C:\\Users\\x, /Users/x, /mnt/c/Users/x, /c/Users/x; names may have blanks
        (
            r"(?P<head>(?:\b[a-z]:|/mnt/[a-z]|/[a-z])?[\\/]{1,4}Users[\\/]{1,4})[^\\/\r\n:'\"<>|*?]+(?=[\\/'\"\r\n]|$)",
            r"\g<head>USER",
        ),
        (r"(?P<head>/(?:home|data/home|export/home)/)[^/\s:'\"]+", r"\g<head>USER"),
        (rf"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:{_BYTE}\.){{3}}{_BYTE}(?![.\d\w\-])", "IP"),
    )
)
# Names that are words of the logs themselves: removing them would make the text unreadable and hides nobody.
_NOT_A_NAME = {"root", "user", "admin", "administrator", "runner", "build", "python", "torch", "mamba", "conda", "home"}
_NOT_A_NAME |= {"test", "default", "localhost"}


def scrub(
    text: str,
    *,
    environ: Mapping[str, str] = os.environ,
    names: tuple[str, ...] | None = None,
    keep_paths: bool = False,
) -> str:
    """Return `text` without what points at a person, a machine or an account.

    Parameters
    ----------
    text : str
    environ : mapping
        Values of its variables that look like secrets are removed wherever they stand.
    names : tuple of str, optional
        User and machine names to remove; this user's and this machine's by default.
    keep_paths : bool
        Leave home folders and names in; secrets, e-mail and IP addresses go all the same.
    """
    for variable, value in environ.items():
        if len(value) >= 8 and re.search(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL", variable, re.IGNORECASE):
            text = text.replace(value, "SECRET")
    for pattern, replacement in _SHAPES:
        if not (keep_paths and replacement.endswith("USER")):
            text = pattern.sub(replacement, text)
    if keep_paths:
        return text
    for name in _own_names() if names is None else names:
        if len(name) >= 3 and name.lower() not in _NOT_A_NAME:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "NAME", text, flags=re.IGNORECASE)
    return text


def _own_names() -> tuple[str, ...]:
    names = [platform.node(), platform.node().split(".")[0]]
    with contextlib.suppress(KeyError, OSError, ImportError):  # a container without a user of this number
        names.append(getpass.getuser())
    with contextlib.suppress(RuntimeError):
        names.append(Path.home().name)
    return tuple(name for name in names if name)
