"""Which versions go into the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from anymamba import __version__
from anymamba.doctor.reference import reference_rows
from anymamba.doctor.torch_index import INDEX, best_tag
from anymamba.errors import OptionError
from anymamba.machine import Machine
from anymamba.upstream.releases import DEFAULTS

__all__ = ["SETS", "Choice", "choose_versions"]

SETS = {
    "reference": "the guide's environment: Python 3.10, torch 2.1.1, CUDA 11.8",
    "here": "what is installed here",
    "newest": "the newest torch that this machine's driver and card can run",
}

_NEWEST_PYTHON = "3.12"
# The NVIDIA base images and their system's Python, by PyTorch's CUDA tag.
_IMAGES = {
    "cu118": ("11.8.0", "ubuntu22.04", "3.10"),
    "cu121": ("12.1.1", "ubuntu22.04", "3.10"),
    "cu124": ("12.4.1", "ubuntu22.04", "3.10"),
    "cu126": ("12.6.3", "ubuntu24.04", "3.12"),
    "cu128": ("12.8.0", "ubuntu24.04", "3.12"),
    "cu130": ("13.0.0", "ubuntu24.04", "3.12"),
}


@dataclass(frozen=True)
class Choice:
    """Versions for the files of a route.

    `torch` None: the newest. `tag` is PyTorch's index ("cu118", "cpu"); None: the default index. `anymamba` is what pip
    is to install for this product: a requirement, a wheel's path or an address.
    """

    python: str
    torch: str | None
    tag: str | None
    companions: tuple[tuple[str, str], ...] = ()  # torchvision, torchaudio, pinned
    mamba_ssm: str = DEFAULTS["mamba_ssm"]
    causal_conv1d: str = DEFAULTS["causal_conv1d"]
    anymamba: str = f"anymamba=={__version__}"
    native: bool = False

    @property
    def index(self) -> str | None:
        """The address of the index with torch."""
        return None if self.tag is None else f"{INDEX}/{self.tag}"

    @property
    def gpu(self) -> bool:
        """Whether the torch is one for NVIDIA cards."""
        return self.tag is not None and self.tag.startswith("cu")

    @property
    def cuda(self) -> str | None:
        """11.8 for cu118."""
        return f"{self.tag[2:-1]}.{self.tag[-1]}" if self.gpu and self.tag else None

    @property
    def image(self) -> tuple[str, str, str]:
        """CUDA version, system and its Python of the NVIDIA base image."""
        return _IMAGES.get(self.tag or "", _IMAGES["cu126"])

    def torch_requirements(self) -> list[str]:
        """Return torch and its companions as pip requirements."""
        if self.torch is None:
            return ["torch"]
        pins = [("torch", self.torch), *self.companions]
        return [f"{name}=={version}" for name, version in pins]

    def requirements(self) -> list[str]:
        """Return everything else as pip requirements."""
        wanted = [self.anymamba]
        release = tuple(int(part) for part in (self.torch or "9.9").split("+")[0].split(".")[:2])
        if release < (2, 3):
            wanted.insert(0, "numpy<2")  # torch below 2.3 was compiled against NumPy 1
        if self.native:
            wanted += ["ninja", "packaging", "setuptools<81", "wheel", "einops"]
        return wanted


def choose_versions(
    which: str,
    *,
    machine: Callable[[], Machine],
    native: bool = False,
    anymamba: str | None = None,
) -> Choice:
    """Choose the versions.

    Parameters
    ----------
    which : {"reference", "here", "newest"}
    machine : callable
        Returns this machine's facts; only called when they are needed.
    native : bool
        Prepare for compiling upstream's extensions too.
    anymamba : str, optional
        What to install for this product instead of its version from the index.

    Raises
    ------
    OptionError
        If there is no such set, or "here" is asked for and no torch is installed.
    """
    if which == "reference":
        choice = _reference()
    elif which == "here":
        choice = _here(machine())
    elif which == "newest":
        choice = Choice(_NEWEST_PYTHON, None, best_tag(machine()))
    else:
        raise OptionError(f"There is no set of versions named {which!r}.", why=f"the sets are: {', '.join(SETS)}")
    if native and choice.tag == "cu130":
        # Upstream's sources of these versions need patches for CUDA 13.
        choice = replace(choice, tag="cu128", torch=None, companions=())
    if native and not choice.gpu:
        choice = replace(choice, tag="cu126", torch=None, companions=())
    return replace(choice, native=native, anymamba=anymamba or choice.anymamba)


def _reference() -> Choice:
    rows = {row["id"]: row["wanted"] for row in reference_rows()}
    tag = "cu" + rows["torch-cuda"].replace(".", "")
    return Choice(
        python=rows["python"],
        torch=f"{rows['torch']}+{tag}",
        tag=tag,
        companions=tuple((name, f"{rows[name]}+{tag}") for name in ("torchvision", "torchaudio")),
    )


def _here(machine: Machine) -> Choice:
    if machine.torch is None:
        raise OptionError("No torch is installed here.", next_step="anymamba export ... --versions newest")
    local = machine.torch.version.partition("+")[2]
    tag = local if local == "cpu" or local.startswith("cu") else None
    companions = tuple(
        (name, version)
        for name in ("torchvision", "torchaudio")
        if (version := machine.packages.version(name)) is not None
    )
    return Choice(".".join(map(str, machine.python.release)), machine.torch.version, tag, companions)
