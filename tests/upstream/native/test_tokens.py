"""The tokens of a text are that text, and strings, comments and header names are never code."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anymamba.upstream.native.tokens import Edit, code, edited, tokenize

PIECES = st.sampled_from(
    ["and", '"and"', "'a'", "// and\n", "/* and */", 'R"x(and)"\n)x"', "#define A and\\\n or\n", "#include <a and b>\n",
     "1'000u", "0x1p-3", "\\\n", "\n", "\r\n", "(", ")", "::", "->", '"', "'", "/*", "\\", "#", " ", "\t", "é", "u8"]
)  # fmt: skip


@given(st.lists(PIECES).map("".join) | st.text())
def test_the_tokens_of_any_text_are_that_text(text: str) -> None:
    tokens = tokenize(text)
    assert "".join(token.text for token in tokens) == text
    assert [token.start for token in tokens] == [sum(len(t.text) for t in tokens[:i]) for i in range(len(tokens))]


def words(text: str) -> list[str]:
    return [token.text for token in tokenize(text) if token.kind == "identifier"]


def test_words_in_strings_comments_and_header_names_are_no_identifiers() -> None:
    assert words('a = "x and y" + \'n\' + R"d(z " and)d"; // and\n/* and\n and */ b') == ["a", "b"]
    assert words("#include <and/or.h>\nc") == ["include", "c"]
    assert words('"a\\" and" d "b\\\n and"') == ["d"]
    assert words("// continued \\\n and\ne") == ["e"]


def test_digit_separators_do_not_open_a_character() -> None:
    assert [t.text for t in code(tokenize("int a = 1'000'000; char b = 'x';"))] == [
        "int", "a", "=", "1'000'000", ";", "char", "b", "=", "'x'", ";",
    ]  # fmt: skip


def test_every_token_knows_its_directive_to_the_end_of_the_logical_line() -> None:
    tokens = tokenize("#define A(x) \\\n  x and y\nz\n  # ifdef B\n")
    assert {t.text: t.directive for t in tokens if t.kind == "identifier"} == {
        "define": "define", "A": "define", "x": "define", "and": "define", "y": "define", "z": "", "ifdef": "ifdef",
        "B": "ifdef",
    }  # fmt: skip
    assert tokenize("a # b")[2].kind == "punctuation"  # no directive: something stands before it


def test_edits_are_made_at_their_places_in_any_order() -> None:
    assert edited("abcdef", [Edit(4, 5, "E"), Edit(0, 1, ""), Edit(2, 2, "-")]) == "b-cdEf"
