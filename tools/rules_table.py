"""The table of patch rules in docs/native.md, made from the rules themselves.

python -m tools.rules_table            show it
python -m tools.rules_table --write    put it into the document
"""

from __future__ import annotations

import sys
from pathlib import Path

from anymamba.upstream.native.rules import Rule, Target, all_rules

__all__ = ["DOCUMENT", "guide_table", "replaced", "rules_table"]

DOCUMENT = Path(__file__).parents[1] / "docs" / "native.md"
_TARGETS = (
    Target("Windows", (11, 8), msc_version=1944, architectures=("8.6",)),
    Target("Windows", (13, 0), msc_version=1944, architectures=("8.6",)),
    Target("Linux", (13, 0), architectures=("8.6",)),
)


def rules_table() -> str:
    """Return the rules: who complains, in which words, for which releases, and the cure."""
    lines = ["| rule | without it | releases | cure |", "|---|---|---|---|"]
    for rule in all_rules():
        releases = "; ".join(f"{name} {versions or 'all'}" for name, versions in rule.releases.items())
        lines.append(f"| `{rule.id}` | {rule.compiler}: {_cell(rule.says)} | {releases} | {_cure(rule)} |")
    return "\n".join(lines)


def guide_table() -> str:
    """Return what the guide says of each fault, and whether that holds."""
    lines = ["| rule | the guide | why |", "|---|---|---|"]
    lines += [f"| `{rule.id}` | {_cell(rule.guide)} | {_cell(rule.reason)} |" for rule in all_rules()]
    return "\n".join(lines)


def _cure(rule: Rule) -> str:
    ways = []
    if rule.flags is not None:
        target = next((target for target in _TARGETS if rule.wanted(target)), _TARGETS[0])
        flags = rule.flags(target)
        ways.append(f"flags `{' '.join(dict.fromkeys((*flags.host, *flags.nvcc)))}`")
    if rule.edit is not None:
        files = sorted({file for names in rule.files.values() for file in names})
        ways.append(f"edit of {', '.join(f'`{Path(file).name}`' for file in files)}")
    return f"{' or '.join(ways)}{', when asked for' if rule.asked else ''}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def replaced(text: str) -> str:
    """Return the document with both tables as they are now."""
    for name, table in (("rules", rules_table()), ("guide", guide_table())):
        begin, end = f"<!-- {name}: made by tools/rules_table.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
    else:
        print(rules_table())
