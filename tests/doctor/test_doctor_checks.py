"""Each check says the right thing about machines built by hand, and offers one line that cures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import machines
from anymamba.doctor import Diagnosis, Result, Status, Way, examine
from anymamba.doctor.checks import all_checks
from anymamba.doctor.torch_index import best_tag
from anymamba.machine import Machine
from anymamba.machine.compilers import Compilers, Nvcc, Tool, VisualStudio
from anymamba.machine.driver import Card, Driver
from anymamba.machine.network import Network
from anymamba.machine.packages import Installed, Packages, Upstream
from anymamba.machine.system import System
from anymamba.machine.torch_build import OperatorRun, TorchCard
from anymamba.machine.triton import Triton
from anymamba.machine.wsl import Wsl


def result(machine: Machine, identifier: str) -> Result | None:
    return next((one for one in examine(machine).results if one.id == identifier), None)


def status(machine: Machine, identifier: str) -> str:
    found = result(machine, identifier)
    return "absent" if found is None else found.status.value


@pytest.fixture(params=machines.ALL, ids=lambda make: make.__name__)
def diagnosis(request: pytest.FixtureRequest) -> Diagnosis:
    return examine(request.param())


def test_every_failed_or_doubtful_check_says_why_and_offers_one_line(diagnosis: Diagnosis) -> None:
    for one in diagnosis.results:
        if one.status in (Status.FAIL, Status.WARN):
            assert one.why, one.id
            assert one.wanted, one.id
            assert "\n" not in one.fix, one.id
            if one.id != "gpu-architecture":  # no command changes a card
                assert one.fix, one.id


def test_ids_are_unique_and_every_check_answers_with_one_shape(diagnosis: Diagnosis) -> None:
    ids = [one.id for one in diagnosis.results]
    assert len(ids) == len(set(ids))
    assert all(one.title and one.seen for one in diagnosis.results)


def test_checks_are_found_by_themselves() -> None:
    names = [check.__name__ for check in all_checks()]  # type: ignore[attr-defined]
    assert names[0] == "python_version"
    assert {"torch_installed", "home_variable", "operators_run", "studio_for_cuda"} <= set(names)
    assert not any(name in names for name in ("for_system", "Result", "install_command"))


# The machines as a whole


def test_the_laptop_runs_the_port_on_its_cpu_and_hears_about_the_idle_card() -> None:
    diagnosis = examine(machines.windows_laptop())
    assert diagnosis.healthy(Way.PORT)
    assert not diagnosis.healthy(Way.NATIVE)
    gpu, cpu, native = diagnosis.verdicts
    assert (gpu.works, gpu.obstacles) == (False, ("torch-cuda-build",))
    assert cpu.works
    assert not native.works
    build = result(machines.windows_laptop(), "torch-cuda-build")
    assert build is not None
    assert "RTX 3060" in build.seen
    assert build.fix.endswith("/cu126")


def test_the_reference_workstation_is_well_for_both_ways() -> None:
    diagnosis = examine(machines.reference_workstation())
    assert diagnosis.healthy(Way.PORT)
    assert diagnosis.healthy(Way.NATIVE)
    assert [row.id for row in diagnosis.reference if not row.agrees] == []
    assert all(verdict.works for verdict in diagnosis.verdicts)


def test_ci_without_a_card_has_nothing_to_mend_for_the_port() -> None:
    diagnosis = examine(machines.cpu_ci())
    assert [one.id for one in diagnosis.about(Way.PORT) if one.status in (Status.WARN, Status.FAIL)] == []
    assert diagnosis.verdicts[0].works is None
    assert [row.id for row in diagnosis.reference if row.id in ("visual-studio", "windows-sdk")] == []


def test_the_locked_server_hears_of_its_driver_and_of_a_place_to_install() -> None:
    diagnosis = examine(machines.locked_server())
    available = result(machines.locked_server(), "torch-cuda-available")
    assert available is not None
    assert available.status is Status.FAIL
    assert "driver 470.82.01 runs CUDA up to 11.4" in available.why
    assert available.fix.endswith("/cu118")
    assert status(machines.locked_server(), "place-to-install") == "fail"
    assert status(machines.locked_server(), "cache-folder") == "warn"
    assert not diagnosis.healthy(Way.PORT)


def test_a_broken_torch_is_explained_and_its_version_still_known() -> None:
    imports = result(machines.broken_torch(), "torch-imports")
    assert imports is not None
    assert imports.status is Status.FAIL
    assert "Visual C++" in imports.why
    assert "VCRedist" in imports.fix
    installed = result(machines.broken_torch(), "torch-installed")
    assert installed is not None
    assert installed.seen == "2.4.0+cu121"


def test_without_torch_the_doctor_still_answers_with_the_right_index() -> None:
    installed = result(machines.no_torch(), "torch-installed")
    assert installed is not None
    assert installed.status is Status.FAIL
    assert installed.fix == "python -m pip install torch --index-url https://download.pytorch.org/whl/cu126"
    assert not examine(machines.no_torch()).healthy(Way.PORT)


# Single checks, one table


def laptop(**changes: object) -> Machine:
    return machines.reference_workstation(**changes)


def with_driver(cuda: str | None, *capabilities: tuple[int, int]) -> Machine:
    cards = tuple(Card("card", capability, 8.0) for capability in capabilities)
    return machines.cpu_ci(driver=Driver("1" if cuda else None, cuda, cards, on_bus=bool(cards)))


@pytest.mark.parametrize(
    ("machine", "tag"),
    [
        (with_driver("13.0", (8, 6)), "cu130"),
        (with_driver("13.0", (7, 0)), "cu126"),
        (with_driver("12.8", (12, 0)), "cu128"),
        (with_driver("12.4", (8, 6)), "cu126"),
        (with_driver("11.4", (7, 5)), "cu118"),
        (with_driver(None), "cpu"),
    ],
)
def test_the_index_fits_driver_and_card(machine: Machine, tag: str) -> None:
    assert best_tag(machine) == tag


def compilers(**changes: object) -> Compilers:
    return replace(machines.reference_workstation().compilers, **changes)  # type: ignore[arg-type]


NEW_STUDIO = VisualStudio("Visual Studio 2022", "17.14.1", r"C:\VS", ("14.44.35207",))
BOTH_TOOLSETS = VisualStudio("Visual Studio 2022", "17.14.1", r"C:\VS", ("14.44.35207", "14.38.33130"))
NVCC_124 = Nvcc("nvcc", "12.4", "PATH")
BLACKWELL = Driver("570.1", "12.8", (Card("RTX 5090", (12, 0), 32.0),), on_bus=True)


def linux(**changes: object) -> Machine:
    return machines.cpu_ci(torch=machines.cuda_torch(), **changes)


def gcc(version: str, nvcc: str) -> Compilers:
    return Compilers(nvcc=(Nvcc("/cuda/bin/nvcc", nvcc, "PATH"),), gcc=Tool("gcc", version))


@pytest.mark.parametrize(
    ("machine", "identifier", "wanted"),
    [
        (machines.cpu_ci(python=machines.python(version="3.9.2")), "python-version", "fail"),
        (machines.cpu_ci(python=machines.python(version="3.15.0")), "python-version", "warn"),
        (machines.cpu_ci(python=machines.python(bits=32)), "python-kind", "fail"),
        (machines.cpu_ci(python=machines.python(free_threaded=True)), "python-kind", "warn"),
        (machines.cpu_ci(python=machines.python(externally_managed=True)), "python-environment", "warn"),
        (machines.cpu_ci(python=machines.python(pip=None)), "python-pip", "fail"),
        (machines.cpu_ci(torch=machines.torch(version="1.13.1")), "torch-release", "fail"),
        # NumPy 2 against torch 2.1
        (laptop(packages=Packages((), (Installed("numpy", "2.0.1"),))), "numpy-for-torch", "warn"),
        (
            machines.cpu_ci(torch=machines.torch(numpy_works=False)),
            "numpy-for-torch",
            "fail",
        ),
        (machines.cpu_ci(), "numpy-for-torch", "ok"),
        (machines.cpu_ci(packages=Packages((), (Installed("torchvision", "0.16.1"),))), "torch-companions", "warn"),
        (machines.cpu_ci(packages=Packages((), (Installed("torchvision", "0.21.0"),))), "torch-companions", "absent"),
        (machines.cpu_ci(packages=Packages((), (), ("torch",))), "one-of-each", "warn"),
        # a card that torch cannot see
        (laptop(torch=machines.cuda_torch(cuda_available=False, cards=())), "torch-cuda-available", "fail"),
        (
            machines.cpu_ci(torch=machines.cuda_torch(cuda_available=False, cards=())),
            "torch-cuda-available",
            "info",
        ),
        (
            laptop(
                torch=machines.cuda_torch(cards=(TorchCard("5090", (12, 0), False, "no kernel image is available"),))
            ),
            "torch-runs-on-card",
            "fail",
        ),
        (machines.cpu_ci(driver=Driver(on_bus=True, problem="nvmlInit_v2 answers 9")), "gpu-seen", "warn"),
        (with_driver("12.2", (6, 1)), "gpu-architecture", "warn"),
        # operators
        (
            machines.cpu_ci(operators=(OperatorRun("selective_scan_fn", "cpu", False, problem="RuntimeError: x"),)),
            "operators-run",
            "fail",
        ),
        (machines.cpu_ci(operators=()), "operators-run", "absent"),
        # packages
        (
            machines.cpu_ci(packages=Packages((Upstream("mamba_ssm", "1.0.1", "/env", "foreign", None),), ())),
            "mamba-ssm-installed",
            "warn",
        ),
        (
            machines.cpu_ci(packages=Packages((Upstream("mamba_ssm", "2.2.2+anymamba.1", "/env", "port", "x"),), ())),
            "mamba-ssm-installed",
            "ok",
        ),
        (machines.cpu_ci(folders=machines.folders(shadowed=("mamba_ssm",))), "not-shadowed", "warn"),
        (
            machines.cpu_ci(
                packages=Packages(
                    (Upstream("mamba_ssm", "2.2.2", "/env", "native", "x.so"),), (Installed("transformers", "5.0.0"),)
                )
            ),
            "transformers-for-upstream",
            "warn",
        ),
        # network
        (machines.cpu_ci(), "proxy-addresses", "absent"),
        (machines.cpu_ci(network=Network((("HTTPS_PROXY", "127.0.0.1:7890"),))), "proxy-addresses", "warn"),
        (machines.cpu_ci(network=Network((("HTTPS_PROXY", "https://127.0.0.1:7890"),))), "proxy-addresses", "warn"),
        (machines.cpu_ci(network=Network((("HTTPS_PROXY", "http://proxy.example:80"),))), "proxy-addresses", "info"),
        (
            machines.cpu_ci(network=Network((), (("PIP_CERT", "/gone.pem"),), ("PIP_CERT",))),
            "certificate-files",
            "warn",
        ),
        # WSL
        (machines.cpu_ci(), "wsl-version", "absent"),
        (machines.cpu_ci(wsl=Wsl(1, False, False)), "wsl-version", "warn"),
        (machines.cpu_ci(wsl=Wsl(2, True, True)), "wsl-version", "warn"),
        (machines.cpu_ci(wsl=Wsl(2, True, False)), "wsl-version", "ok"),
        (
            machines.cpu_ci(wsl=Wsl(2, True, False), python=machines.python(prefix="/mnt/d/env")),
            "wsl-folder",
            "warn",
        ),
        # HOME
        (machines.windows_laptop(), "home-variable", "info"),
        (machines.windows_laptop(triton=Triton("triton", "2.0.0")), "home-variable", "warn"),
        (machines.cpu_ci(folders=machines.folders(home_variable=None, home=None)), "home-variable", "warn"),
        (machines.cpu_ci(folders=machines.folders(cache_free_gb=0.1)), "disk-space", "warn"),
        # Windows
        (machines.windows_laptop(), "long-paths", "info"),
        (
            machines.windows_laptop(folders=machines.windows_folders(site_packages="C:\\" + "x" * 130)),
            "long-paths",
            "warn",
        ),
        (machines.windows_laptop(), "code-page", "warn"),
        (
            machines.windows_laptop(folders=machines.windows_folders(temporary=r"C:\Users\李\Temp")),
            "ascii-folders",
            "warn",
        ),
        # compilers
        (laptop(), "visual-studio", "ok"),
        (machines.windows_laptop(), "visual-studio", "fail"),
        (machines.cpu_ci(), "visual-studio", "absent"),
        (laptop(compilers=compilers(windows_sdk=())), "windows-sdk", "fail"),
        (laptop(compilers=compilers(visual_studio=(NEW_STUDIO,))), "studio-for-cuda", "fail"),
        (laptop(compilers=compilers(visual_studio=(BOTH_TOOLSETS,))), "studio-for-cuda", "warn"),
        (
            laptop(compilers=compilers(visual_studio=(NEW_STUDIO,), nvcc=(NVCC_124,))),
            "studio-for-cuda",
            "ok",
        ),
        (laptop(compilers=compilers(nvcc=(NVCC_124,))), "nvcc-matches-torch", "fail"),
        (laptop(compilers=compilers(nvcc=(Nvcc("nvcc", "11.7", "PATH"),))), "nvcc-matches-torch", "warn"),
        (laptop(compilers=compilers(nvcc=())), "nvcc-found", "fail"),
        (laptop(driver=BLACKWELL), "nvcc-knows-card", "fail"),
        (laptop(), "nvcc-knows-card", "absent"),
        (linux(compilers=gcc("13.2.0", "11.8")), "host-compiler", "fail"),
        (linux(compilers=gcc("11.4.0", "11.8")), "host-compiler", "ok"),
        (linux(compilers=gcc("4.8.5", "11.8")), "host-compiler", "fail"),
        (linux(compilers=gcc("13.2.0", "12.4")), "host-compiler", "ok"),
        (machines.cpu_ci(), "cuda-torch", "fail"),
        (laptop(compilers=compilers(ninja=None)), "ninja-found", "warn"),
        (machines.cpu_ci(system=System("Linux", "6", "x86_64", 16, 15.0)), "build-memory", "warn"),
        (
            laptop(compilers=compilers(variables=(("MAMBA_FORCE_BUILD", "1"),))),
            "build-variables",
            "warn",
        ),
        (laptop(compilers=compilers(variables=(("MAMBA_FORCE_BUILD", "TRUE"),))), "build-variables", "absent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_check(machine: Machine, identifier: str, wanted: str) -> None:
    assert status(machine, identifier) == wanted


def test_the_right_proxy_is_spelt_out() -> None:
    found = result(machines.windows_laptop(network=Network((("HTTPS_PROXY", "127.0.0.1:7890"),))), "proxy-addresses")
    assert found is not None
    assert found.fix == "set HTTPS_PROXY=http://127.0.0.1:7890"


def test_a_second_nvcc_of_the_right_version_is_offered() -> None:
    right = Nvcc("/opt/cuda-11.8/bin/nvcc", "11.8", "default")
    wrong = Nvcc("/usr/bin/nvcc", "12.4", "PATH")
    found = result(linux(compilers=Compilers(nvcc=(wrong, right))), "nvcc-matches-torch")
    assert found is not None
    assert found.fix == "export CUDA_HOME='/opt/cuda-11.8'"


@pytest.mark.parametrize("make", machines.ALL)
def test_fixes_speak_the_language_of_the_systems_shell(make: Callable[[], Machine]) -> None:
    machine = make()
    for one in examine(machine).results:
        if machine.system.name == "Windows":
            assert not one.fix.startswith(("export ", "sudo ")), one.id
        else:
            assert not one.fix.startswith(("setx ", "winget ", "reg ")), one.id
