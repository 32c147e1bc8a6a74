"""The document's tables are made from the rules, and are those of now."""

from __future__ import annotations

import re
from pathlib import Path

from anymamba.upstream.native.rules import all_rules
from tools.rules_table import DOCUMENT, replaced


def test_the_tables_of_the_document_are_the_rules() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(text) == text, "python -m tools.rules_table --write"
    assert text.count("| `rocm-in-macro` |") == 4  # rules, the guide, real compilers, what proves it


def test_every_rule_stands_beside_what_proves_it_and_every_named_test_exists() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    proofs = text.partition("## Each fault, its cure and its proof")[2].partition("\n## ")[0]
    assert [one.id for one in all_rules() if f"`{one.id}`" not in proofs] == []
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", proofs))
    assert len(named) > 5 and [name for name in named if f"def {name}(" not in tests] == []
