"""Copy upstream's tests out of a checkout, adapt them to this device, and run them against what is installed here."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.upstream_tests.adapt import adapt, adaptations


def main() -> int:
    """Parse the arguments, adapt the tests, run pytest; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream_tests",
        description="Run upstream's own tests, from a checkout you have, against the packages installed here.",
        epilog="example: python -m tools.upstream_tests ../causal-conv1d --python .venv-demo/bin/python",
    )
    parser.add_argument("checkout", type=Path, help="folder of state-spaces/mamba or Dao-AILab/causal-conv1d")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the packages and pytest installed")
    arguments, pytest_arguments = parser.parse_known_args()
    source = arguments.checkout / "tests"
    if not source.is_dir():
        parser.error(f"{source} is not there: is {arguments.checkout} a checkout of upstream?")
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as folder:
        reasons = {change.name: change.reason for change in adaptations}
        for file in sorted(source.rglob("*.py")):
            text, applied = adapt(file.name, file.read_text(encoding="utf-8"), arguments.device)
            target = Path(folder, file.relative_to(source))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            for name in applied:
                print(f"{file.relative_to(source)}: {name} ({reasons[name]})", flush=True)
        # The empty ini file keeps pytest from looking for settings above the temporary folder.
        Path(folder, "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8")
        command = [arguments.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder, *pytest_arguments]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
