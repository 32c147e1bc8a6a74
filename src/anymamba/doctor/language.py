"""The doctor's texts in another language.

Checks write English. `chinese.toml` holds for each of their texts, with {names} where values stand, the same in Chinese; a
text is found by its words and the values are put back. A text that is not there stays English: better a foreign sentence than
none. A test has every text of every machine it knows translated.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, replace
from importlib import resources

from anymamba.doctor.reference import ReferenceRow
from anymamba.doctor.result import Result

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["LANGUAGES", "in_language", "row_in_language", "translate"]

LANGUAGES = ("en", "zh")

# A cure is a command line, with words in brackets after four blanks that no shell needs.
_REMARK = re.compile(r"(?<=    )\((?P<words>.*?)\)(?=$|; )")


@dataclass(frozen=True)
class _Template:
    pattern: re.Pattern[str]
    text: str
    letters: int


def in_language(result: Result, language: str) -> Result:
    """Return the result with its texts in `language` (en or zh); ids, commands and values stay."""
    if language == "en":
        return result
    return replace(
        result,
        title=translate(result.title, language),
        seen=translate(result.seen, language),
        wanted=translate(result.wanted, language),
        why=translate(result.why, language),
        fix=_fix(result.fix, language),
    )


def row_in_language(row: ReferenceRow, language: str) -> ReferenceRow:
    """Return the row of the reference environment with its note in `language`."""
    if language == "en":
        return row
    return replace(row, title=translate(row.title, language), note=translate(row.note, language))


def translate(text: str, language: str) -> str:
    """Return a text of the doctor's in `language`, or the text itself where there is no other."""
    if language == "en" or not text:
        return text
    texts, templates = _chinese()
    if text in texts:
        return texts[text]
    for template in templates:
        found = template.pattern.fullmatch(text)
        if found is not None:
            values = {name: translate(value or "", language) for name, value in found.groupdict().items()}
            return template.text.format_map(values)
    return text


def _fix(fix: str, language: str) -> str:
    if "    (" not in fix:
        return translate(fix, language)
    return _REMARK.sub(lambda found: f"（{translate(found['words'], language)}）", fix)


@functools.cache
def _chinese() -> tuple[dict[str, str], tuple[_Template, ...]]:
    file = resources.files("anymamba.doctor") / "chinese.toml"
    texts: dict[str, str] = tomllib.loads(file.read_text(encoding="utf-8"))["texts"]
    templates = []
    for english, chinese in texts.items():
        parts = re.split(r"\{(\w+)\}", english)
        if len(parts) > 1:
            # odd parts are names; a name used twice means the same value
            seen: set[str] = set()
            pattern = ""
            for index, part in enumerate(parts):
                if index % 2 == 0:
                    pattern += re.escape(part)
                elif part in seen:
                    pattern += f"(?P={part})"
                else:
                    seen.add(part)
                    pattern += f"(?P<{part}>.+?)"
            letters = sum(len(part) for part in parts[::2])
            templates.append(_Template(re.compile(pattern, re.DOTALL), chinese, letters))
    # the one with the most words of its own first: "{a} and {b}" fits too much
    return texts, tuple(sorted(templates, key=lambda template: -template.letters))
