"""What `anymamba export` writes: consistent with our own constants, and accepted by the tools that will read it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import machines
from anymamba import __version__
from anymamba.doctor.reference import reference_rows
from anymamba.errors import OptionError
from anymamba.machine.driver import Card, Driver
from anymamba.routes import ROUTES, Choice, File, choose_versions, make_route, write_files
from anymamba.upstream.releases import DEFAULTS

BLACKWELL = machines.cpu_ci(driver=Driver("580.1", "13.0", (Card("RTX 5090", (12, 0), 32.0),), on_bus=True))
CHOICES = {
    "reference": choose_versions("reference", machine=machines.cpu_ci),
    "reference-native": choose_versions("reference", machine=machines.cpu_ci, native=True),
    "newest-cpu": choose_versions("newest", machine=machines.cpu_ci),
    "newest-laptop": choose_versions("newest", machine=machines.windows_laptop),
    "newest-blackwell": choose_versions("newest", machine=lambda: BLACKWELL),
    "newest-blackwell-native": choose_versions("newest", machine=lambda: BLACKWELL, native=True),
    "here": choose_versions("here", machine=machines.reference_workstation),
    "here-wheel": choose_versions("here", machine=machines.cpu_ci, anymamba="./anymamba-0.1.0-py3-none-any.whl"),
}


def every_file() -> Iterator[tuple[str, File]]:
    for name, choice in CHOICES.items():
        for route in ROUTES:
            for file in make_route(route, choice):
                yield f"{name}/{route}/{file.path}", file


FILES = dict(every_file())


def ending(*suffixes: str) -> list[str]:
    return [name for name in FILES if name.endswith(suffixes)]


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (it is one of the development tools)")
    return found


def accepted(command: list[str], names: list[str], folder: Path) -> None:
    paths = []
    for number, name in enumerate(names):
        path = folder / f"{number}-{Path(name).name}"
        path.write_bytes(FILES[name].raw)
        paths.append(str(path))
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# The tools that will read the files


def test_shell_scripts_pass_shellcheck(tmp_path: Path) -> None:
    accepted([tool("shellcheck"), "--severity=style"], ending(".sh", ".sbatch"), tmp_path)


def test_dockerfiles_pass_hadolint(tmp_path: Path) -> None:
    accepted([tool("hadolint"), "--failure-threshold=info"], ending("/Dockerfile"), tmp_path)


def test_workflows_are_what_github_takes(tmp_path: Path) -> None:
    accepted([tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows"], ending("mamba.yml"), tmp_path)


def test_actionlint_finds_nothing_in_workflows(tmp_path: Path) -> None:
    accepted([tool("actionlint"), "-no-color"], ending("mamba.yml"), tmp_path)


def test_compose_files_are_what_docker_takes(tmp_path: Path) -> None:
    accepted([tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"], ending("compose.yaml"), tmp_path)


@pytest.mark.parametrize("name", ending(".ps1"))
def test_powershell_scripts_parse(name: str) -> None:
    grammar = pytest.importorskip("tree_sitter_powershell")
    tree_sitter = pytest.importorskip("tree_sitter")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    tree = parser.parse(FILES[name].text.encode("utf-8"))
    assert not tree.root_node.has_error, tree.root_node


@pytest.mark.parametrize("name", ending("environment.yml"))
def test_conda_environments_parse(name: str) -> None:
    yaml = pytest.importorskip("ruamel.yaml")
    environment = yaml.YAML(typ="safe").load(FILES[name].text)
    assert environment["name"] == "anymamba"
    assert any(str(one).startswith("python=3.") for one in environment["dependencies"])
    for one in environment["dependencies"]:
        for requirement in one["pip"] if isinstance(one, dict) else ():
            if not requirement.startswith(("--", ".")):
                Requirement(requirement)


@pytest.mark.parametrize("name", [one for one in ending(".txt") if "here-wheel" not in one])
def test_requirements_parse(name: str) -> None:
    lines = [line for line in FILES[name].text.splitlines() if not line.startswith(("#", "--index-url "))]
    assert lines
    for line in lines:
        Requirement(line)


# What they say


def test_no_placeholder_is_left() -> None:
    assert [name for name, file in FILES.items() if "%%" in file.text] == []


def test_windows_powershell_can_read_its_scripts() -> None:
    for name in ending(".ps1"):
        raw = FILES[name].raw
        assert raw.startswith(b"\xef\xbb\xbf")
        assert raw.count(b"\r\n") == raw.count(b"\n") > 5
    assert all(b"\r" not in FILES[name].raw for name in ending(".sh", "Dockerfile", ".yml"))


def test_the_reference_is_the_guides() -> None:
    rows = {row["id"]: row["wanted"] for row in reference_rows()}
    choice = CHOICES["reference"]
    assert choice.python == rows["python"]
    assert choice.torch_requirements() == [
        f"torch=={rows['torch']}+cu118",
        f"torchvision=={rows['torchvision']}+cu118",
        f"torchaudio=={rows['torchaudio']}+cu118",
    ]
    assert choice.cuda == rows["torch-cuda"] == "11.8"
    assert "numpy<2" in choice.requirements()
    assert "FROM nvidia/cuda:11.8.0-base-ubuntu22.04" in FILES["reference/dockerfile/Dockerfile"].text
    assert "nvidia/label/cuda-11.8.0::cuda-nvcc" in FILES["reference-native/environment/environment.yml"].text
    assert "cuda-nvcc" not in FILES["reference/environment/environment.yml"].text


def test_versions_are_our_own_constants() -> None:
    for name in ending(".sh", ".ps1", "Dockerfile", "mamba.yml", ".sbatch"):
        text = FILES[name].text
        if "anymamba install" in text:
            assert f"mamba_ssm=={DEFAULTS['mamba_ssm']}" in text, name
            assert f"causal_conv1d=={DEFAULTS['causal_conv1d']}" in text, name
    assert CHOICES["reference"].anymamba == f"anymamba=={__version__}"


def test_torch_and_the_rest_never_share_an_index() -> None:
    for name in ending("requirements-torch.txt"):
        assert "anymamba" not in FILES[name].text.replace("`anymamba export`", "")
    assert all("index-url" not in FILES[name].text for name in ending("/requirements.txt", "requirements-offline.txt"))


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("newest-cpu", "cpu"),
        ("newest-laptop", "cu126"),
        ("newest-blackwell", "cu130"),
        ("newest-blackwell-native", "cu128"),
        ("here", "cu118"),
        ("here-wheel", "cpu"),
    ],
)
def test_the_index_is_chosen_for_the_machine(name: str, tag: str) -> None:
    assert CHOICES[name].tag == tag


def test_upstream_is_not_compiled_with_cuda_13() -> None:
    assert "devel" not in FILES["newest-blackwell/dockerfile/Dockerfile"].text
    assert "native-wheel" not in FILES["newest-blackwell/github-actions/.github/workflows/mamba.yml"].text
    assert "devel" in FILES["newest-blackwell-native/dockerfile/Dockerfile"].text


def test_without_a_gpu_nothing_asks_for_one() -> None:
    assert "nvidia" not in FILES["newest-cpu/compose/compose.yaml"].text
    assert "nvidia" not in FILES["newest-cpu/dockerfile/Dockerfile"].text
    assert "gpus" not in FILES["newest-cpu/slurm/mamba.sbatch"].text
    assert "capabilities: [gpu]" in FILES["reference/compose/compose.yaml"].text


def test_the_offline_machine_takes_anymamba_from_the_folder() -> None:
    assert "\nanymamba\n" in FILES["here-wheel/requirements-offline/requirements-offline.txt"].text


def test_here_needs_a_torch() -> None:
    with pytest.raises(OptionError, match="No torch"):
        choose_versions("here", machine=machines.no_torch)
    with pytest.raises(OptionError, match="no set of versions"):
        choose_versions("oldest", machine=machines.cpu_ci)
    with pytest.raises(OptionError, match="no route"):
        make_route("podman", Choice("3.12", None, "cpu"))


# Writing


def test_files_are_written_once_and_then_unchanged(tmp_path: Path) -> None:
    files = make_route("environment", CHOICES["reference"])
    first = write_files(tmp_path, files, overwrite=lambda path: False)
    assert {what for _, what in first} == {"written"}
    assert {what for _, what in write_files(tmp_path, files, overwrite=lambda path: False)} == {"unchanged"}
    if os.name != "nt":
        assert os.access(tmp_path / "setup-environment.sh", os.X_OK)


def test_another_content_is_kept_unless_allowed_and_then_nothing_else_is_written(tmp_path: Path) -> None:
    files = make_route("environment", CHOICES["reference"])
    (tmp_path / "requirements.txt").write_text("mine\n", encoding="utf-8")
    with pytest.raises(OptionError, match=r"requirements\.txt is there"):
        write_files(tmp_path, files, overwrite=lambda path: False)
    assert [path.name for path in tmp_path.iterdir()] == ["requirements.txt"]
    done = dict(write_files(tmp_path, files, overwrite=lambda path: True))
    assert done["requirements.txt"] == "replaced"
    assert "mine" not in (tmp_path / "requirements.txt").read_text(encoding="utf-8")


# Running: the shell scripts, with a Python that only writes down what it is asked

RECORDER = """\
#!/bin/sh
echo "$*" >> "{log}"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
fi
"""


@pytest.mark.skipif(os.name == "nt", reason="sh")
@pytest.mark.parametrize(("route", "script"), [("environment", "setup-environment.sh"), ("slurm", "mamba.sbatch")])
def test_the_scripts_install_torch_first_and_prove_it_last(route: str, script: str, tmp_path: Path) -> None:
    write_files(tmp_path / "out", make_route(route, CHOICES["reference"]), overwrite=lambda path: False)
    log = tmp_path / "log.txt"
    for name in ("python3", "python3.10"):
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(RECORDER.format(log=log), encoding="utf-8")
        fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        ["bash", str(tmp_path / "out" / script), "--setup"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked = log.read_text(encoding="utf-8")
    order = ["-m venv", "-r requirements-torch.txt", "-r requirements.txt", "-m anymamba install mamba_ssm==2.2.2"]
    places = [asked.index(text) for text in order]
    assert places == sorted(places)
