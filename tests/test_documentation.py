"""The documents tell the truth: every command in them exists, and the ones a user types first are executed."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anymamba.cli import app
from anymamba.errors import AnymambaError

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]


def commands(document: str) -> list[str]:
    """Return the commands in console blocks and in back quotes of a document, without prompts and comments."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found: list[str] = []
    for block in re.findall(r"```(?:console|bash|powershell)\n(.*?)```", text, flags=re.DOTALL):
        found += [line.removeprefix("$ ").strip() for line in block.splitlines() if line.strip() and line[0] != "#"]
    found += re.findall(r"`((?:anymamba|python|pip) [^`]+)`", text)
    return list(dict.fromkeys(found))


@functools.cache
def help_of(command: str) -> Any:
    """Return what `anymamba COMMAND --help` says, asked once for all documents; in this process, since each takes seconds."""
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [command, "--help"])


def test_both_readmes_hold_the_same_commands() -> None:
    assert commands("README.md") == commands("README.zh-CN.md")


def test_the_readme_begins_with_the_two_commands_and_ci_runs_the_second() -> None:
    assert commands("README.md")[:2] == ["python dev.py demo", "python dev.py test"]
    assert "dev.py test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_anymamba_command_and_option_exists(document: str) -> None:
    for command in commands(document):
        words = shlex.split(command)
        if words[0] != "anymamba":
            continue
        run = help_of(words[1])
        assert run.exit_code == 0, f"{document}: {command}\n{run.output}"
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in run.output, f"{document}: `{command}` has an option that `{words[1]} --help` does not show"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_script_and_module_that_is_named_exists(document: str) -> None:
    for command in commands(document):
        words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
        if words[0] != "python" or words[1].startswith("-c"):
            continue
        target = ROOT / words[2].replace(".", "/") if words[1] == "-m" else ROOT / words[1]
        ours = target.exists() or target.with_suffix(".py").exists()
        assert ours or words[2] in ("anymamba", "pytest", "ensurepip"), f"{document}: {command}"


def test_the_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    sentence = re.search(r"Exit codes:(.*?)\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert sentence is not None
    told = {int(code) for code in re.findall(r"(?:^|;)\s+(\d+) ", sentence.group(1))}
    kinds: list[type[AnymambaError]] = [AnymambaError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.exit_code for kind in kinds} | {0, 130} == told


def test_the_figures_in_the_readmes_are_those_of_the_result_files() -> None:
    run([sys.executable, "benchmarks/summarise.py", "--check"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / document).parent / link).exists(), f"{document} links to {link}"


@pytest.mark.network
@pytest.mark.skipif("PIP_NO_INDEX" in os.environ, reason="pip may ask no index here; wine reaches none")
def test_the_readme_runs_word_for_word(tmp_path: Path) -> None:
    """The demo, then every other command of the README in the environment the demo made (`dev.py test` is this run)."""
    run([sys.executable, "dev.py", "demo"])
    bin_folder = ROOT / ".venv-demo" / ("Scripts" if os.name == "nt" else "bin")
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONUTF8": "1"}
    done = {
        "python dev.py demo",
        "python dev.py test",
        "python -m tools.windows_lab test",
    }  # the last: a part of `test`
    script = tmp_path / "small.py"
    # not mamba_ssm: an earlier row of the table has taken it out
    script.write_text(
        "import torch\nfrom anymamba.ops import causal_conv1d_fn\n"
        "causal_conv1d_fn(torch.rand(1, 8, 16), torch.rand(8, 4, requires_grad=True)).sum().backward()\n",
        encoding="utf-8",
    )
    placeholders = {"FILE": str(tmp_path / "report.html"), "SCRIPT": str(script)}
    for command in commands("README.md"):
        words = shlex.split(command)
        for number, word in enumerate(words):
            words[number] = placeholders.get(word, word)
        # DIR and CHECKOUT stand for what only the reader has: a card, a checkout of upstream
        if command in done or "use_backend" in command or any(word.isalpha() and word.isupper() for word in words):
            continue
        # doctor's exit code is about this machine, not about the command
        run(words, env=environment, allowed={0, 1} if "doctor" in words else {0})
    run(["anymamba", "install"], env=environment)  # the last of the table took it out again


def run(words: list[str], env: dict[str, str] | None = None, allowed: set[int] = {0}) -> None:  # noqa: B006
    program = shutil.which(words[0], path=(env or os.environ)["PATH"]) or words[0]
    done = subprocess.run(
        [program, *words[1:]], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, encoding="utf-8", errors="replace",
        check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode in allowed, (
        f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )
