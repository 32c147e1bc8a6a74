"""Everything the doctor says exists in Chinese; what is no sentence (values, commands, other programs' words) stays itself."""

from __future__ import annotations

import re
import sys
from importlib import resources

import pytest

import machines
from anymamba.doctor import Result, examine
from anymamba.doctor.language import in_language, row_in_language, translate
from odd_machines import ODD

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MACHINES = [*(make() for make in machines.ALL), *(machine for machine, _, _ in ODD)]
RESULTS = list({result: None for machine in MACHINES for result in examine(machine).results})
TEXTS: dict[str, str] = tomllib.loads(
    (resources.files("anymamba.doctor") / "chinese.toml").read_text(encoding="utf-8")
)["texts"]

# products, modules and functions are called the same in every language
NAMES = {
    "pip", "torch", "torch.version.cuda", "torch.cuda.is_available()", "GPU", "Triton", "mamba_ssm", "causal_conv1d", "HOME",
    "site-packages", "nvcc", "Ninja", "WSL", "einops", "transformers", "GitHub", "Visual Studio C++", "Windows SDK",
}  # fmt: skip
# what other programs say, quoted; and the words of a shell
FOREIGN = re.compile(
    r"\"[^\"]*\"|no kernel image is available|\w*Error: .*|x: undefined symbol: y|https?://\S+: .*|python -m .*"
)
COMMANDS = (
    "anymamba ", "python ", "python3 ", "py ", "conda ", "winget ", "sudo ", "set ", "setx ", "export ", "unset ", "nvidia-smi",
    "xcode-select", "reg ", "wsl ", "cd ", "brew ", '"C:',
)  # fmt: skip


def chinese(text: str) -> bool:
    return re.search(r"[\u4e00-\u9fff]", text) is not None


def sentence(text: str) -> bool:
    """Two English words in a row that nobody else said."""
    return re.search(r"[a-z]{2,} [a-z]{2,}", FOREIGN.sub("", text)) is not None


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.id)
def test_every_text_of_every_check_is_there_in_chinese(result: Result) -> None:
    other = in_language(result, "zh")
    assert chinese(other.title) or other.title in NAMES
    for text in (other.seen, other.wanted, other.why):
        assert chinese(text) or not sentence(text), text
    if other.fix:
        remark = other.fix.partition("    ")[2]
        assert chinese(other.fix) or other.fix.startswith(COMMANDS), other.fix
        assert not remark or chinese(remark), remark
    assert (other.id, other.status, other.way) == (result.id, result.status, result.way)


def test_a_command_is_the_same_in_both_languages() -> None:
    for result in RESULTS:
        command, blanks, _ = result.fix.partition("    ")
        if blanks and command.startswith(COMMANDS):
            assert in_language(result, "zh").fix.startswith(command)


def test_the_reference_environment_is_there_in_chinese() -> None:
    for row in examine(machines.reference_workstation()).reference:
        assert chinese(row_in_language(row, "zh").note), row.id


def test_values_are_put_back_and_translated_where_they_are_texts() -> None:
    assert translate("15.8 GB for 12 compilers at once", "zh") == "15.8 GB，要同时供 12 个编译器使用"
    assert translate("CPU only, beside an NVIDIA card", "zh") == "仅 CPU，而本机有 NVIDIA 显卡"
    assert translate("a text that nobody translated", "zh") == "a text that nobody translated"
    assert translate("not installed", "en") == "not installed"


@pytest.mark.parametrize("english", TEXTS, ids=lambda text: text[:30])
def test_a_translation_has_the_values_of_its_text_and_no_others(english: str) -> None:
    names = re.findall(r"\{(\w+)\}", english)
    assert set(re.findall(r"\{(\w+)\}", TEXTS[english])) == set(names)
    assert len(names) == len(set(names))
