"""In a Windows Python: what `anymamba build` would run, as JSON. `python planner.py ASKED.json ANSWER.json`.

Everything here is the product's: it finds the compilers by INCLUDE, LIB, PATH and CUDA_PATH as on any Windows machine, chooses
the rules, edits the sources and writes the command lines.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from anymamba.machine import read_machine
from anymamba.upstream.native.build import arrange
from anymamba.upstream.native.plan import make_native_plan
from anymamba.upstream.native.toolchain import choose_toolchain
from anymamba.upstream.native.torch_paths import read_torch_paths


def main(asked_file: Path, answer_file: Path) -> None:
    """Answer every case of a file: name, version, source, folder, without."""
    asked = json.loads(asked_file.read_text(encoding="utf-8"))
    python = Path(sys.executable)
    machine, torch = read_machine(operators=False), read_torch_paths(python)
    chain, problems = choose_toolchain(machine)
    found = ".".join(map(str, chain.cuda))
    # nvcc says its own release; the C++ headers may be an older CUDA's, and rules go by those
    chain = dataclasses.replace(chain, cuda=tuple(asked["cuda"]))
    answers = []
    for case in asked["cases"]:
        plan = make_native_plan(
            {case["name"]: case["version"]}, machine, torch, arch=asked["architecture"], without=case["without"],
            given=Path(case["source"]), toolchain=(chain, problems),
        )  # fmt: skip
        (package,) = plan.packages
        arranged = arrange(plan, package, Path(case["folder"]), python=python, given=Path(case["source"]))
        answers.append(
            {
                "steps": [dataclasses.asdict(step) for step in arranged.steps],
                "rules": [cure.rule.id for cure in package.cures],
                "edits": [vars(done) for done in arranged.applied],
                "sources": arranged.sources.origin,
                "proved": arranged.sources.proved,
                "standard": plan.target.standard,
            }
        )
    answer = {
        "cases": answers, "torch": torch.version, "nvcc": found, "msc_version": chain.msc_version,
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }  # fmt: skip
    answer_file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
