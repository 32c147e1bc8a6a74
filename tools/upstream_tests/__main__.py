"""Copy upstream's tests out of a checkout, adapt them to this device, and run them against what is installed here."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

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
    parser.add_argument("--record", metavar="FILE", type=Path, help="note the counts in this JSON file, under --name")
    parser.add_argument("--name", help="of the package and version, for --record (default: the checkout's folder)")
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
        report = Path(folder, "report.xml")
        code = subprocess.run([*command, f"--junitxml={report}"], cwd=folder, check=False).returncode
        if arguments.record is not None and report.is_file():
            record(arguments.record, arguments.name or arguments.checkout.resolve().name, arguments.device, report)
        return code


def record(file: Path, package: str, device: str, report: Path) -> None:
    """Put the counts of a junit report into the result file, in place of an earlier run of the same package and device."""
    suite = ElementTree.parse(report).getroot()[0]
    count = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    run = {
        "package": package,
        "device": device,
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "missed": [
            str(case.get("name"))
            for case in suite.iter("testcase")
            if {each.tag for each in case} & {"failure", "error"}
        ],
        "date": datetime.date.today().isoformat(),
    }
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []
    runs = [other for other in runs if (other["package"], other["device"]) != (package, device)]
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"runs": sorted([*runs, run], key=lambda each: (each["package"], each["device"]))}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
