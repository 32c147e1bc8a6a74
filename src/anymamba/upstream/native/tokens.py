"""C++ and CUDA text as tokens, so that an edit never touches a string, a comment or a header's name by accident.

Not a parser: it knows what a preprocessor and a lexer know (line continuations, raw strings, digit separators, directives),
which is all that the patch rules need. The tokens of a text, joined, are that text, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Edit", "Token", "code", "edited", "tokenize"]


@dataclass(frozen=True)
class Token:
    """A piece of source text.

    Attributes
    ----------
    kind : str
        identifier, number, string, char, comment, space, newline, header (of an #include), hash, punctuation.
    text : str
    start : int
        Where it begins in the whole text.
    directive : str
        The preprocessor directive that it is part of ("define", "ifdef", ...); empty outside of directives.
    """

    kind: str
    text: str
    start: int
    directive: str = ""

    @property
    def end(self) -> int:
        """Where the next token begins."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class Edit:
    """Replace text[start:end]."""

    start: int
    end: int
    text: str


_TOKEN = re.compile(
    r"""
      (?P<string>  (?:u8|[uUL])?R"(?P<fence>[^()\\\s"]{0,16})\(.*?\)(?P=fence)"
                 | (?:u8|[uUL])?"(?:\\(?:\r\n|.)|[^"\\\n])*" )
    | (?P<comment> //(?:\\\r?\n|[^\n\r]|\r(?!\n))* | /\*.*?(?:\*/|\Z) )
    | (?P<number>  \.?[0-9](?:[eEpP][+-]|'[0-9A-Za-z_]|[0-9A-Za-z_.])* )
    | (?P<char>    (?:u8|[uUL])?'(?:\\.|[^'\\\n])+' )
    | (?P<identifier> [A-Za-z_$][A-Za-z0-9_$]* )
    | (?P<newline> \r?\n )
    | (?P<space>   (?:[ \t\f\v]|\\\r?\n)+ )
    | (?P<punctuation> ::|->|&&|\|\||. )
    """,
    re.VERBOSE | re.DOTALL,
)
_HEADER = re.compile(r'<[^>\n]*>|"[^"\n]*"')


def tokenize(text: str) -> list[Token]:
    """Split a text into tokens that add up to it."""
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    position, directive, line_begins = 0, "", True
    hash_open = False  # a "#" was seen whose directive's name has not come yet
    while position < len(text):
        if directive in ("include", "include_next") and (header := _HEADER.match(text, position)):
            yield Token("header", header.group(), position, directive)
            position = header.end()
            continue
        match = _TOKEN.match(text, position)
        assert match is not None and match.lastgroup is not None  # the last alternative takes any character
        kind, piece = next(kind for kind in _KINDS if match.group(kind) is not None), match.group()
        if kind == "newline":
            directive, line_begins, hash_open = "", True, False
        elif kind == "punctuation" and piece == "#" and line_begins:
            kind, line_begins, hash_open = "hash", False, True
        elif kind == "identifier" and hash_open:
            directive, hash_open = piece, False
        elif kind not in ("space", "comment"):
            line_begins, hash_open = False, False
        yield Token(kind, piece, position, "" if kind == "newline" else directive)
        position = match.end()


_KINDS = ("string", "comment", "number", "char", "identifier", "newline", "space", "punctuation")


def code(tokens: Iterable[Token]) -> list[Token]:
    """Return the tokens that a compiler sees: without spaces, newlines and comments."""
    return [token for token in tokens if token.kind not in ("space", "newline", "comment")]


def edited(text: str, edits: Sequence[Edit]) -> str:
    """Return the text with non-overlapping edits made."""
    pieces, position = [], 0
    for edit in sorted(edits, key=lambda one: one.start):
        assert edit.start >= position, "edits overlap"
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])
