"""The document's tables are made from the rules, and are those of now."""

from __future__ import annotations

from tools.rules_table import DOCUMENT, replaced


def test_the_tables_of_the_document_are_the_rules() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(text) == text, "python -m tools.rules_table --write"
    assert text.count("| `rocm-in-macro` |") == 3  # rules, the guide, real compilers
