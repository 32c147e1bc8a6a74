"""Each check says the right thing about machines built by hand, and offers one line that cures it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import machines
from anymamba.doctor import Diagnosis, Result, Status, Way, examine
from anymamba.doctor.checks import all_checks
from anymamba.doctor.torch_index import best_tag
from anymamba.machine import Machine
from anymamba.machine.compilers import Compilers, Nvcc
from anymamba.machine.network import Network
from odd_machines import ODD, linux, with_driver


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


@pytest.mark.parametrize(("machine", "identifier", "wanted"), ODD, ids=[identifier for _, identifier, _ in ODD])
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
