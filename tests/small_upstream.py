"""Small stand-ins for upstream's source archives, written for the tests: the same seams, none of the text."""

from __future__ import annotations

import io
import tarfile
import venv
from pathlib import Path

import anymamba

# Newer than every release that the lock file knows, so that the index's word counts.
VERSION = "99.0"

SCAN = """\
from torch.cuda.amp import custom_bwd, custom_fwd
import selective_scan_cuda

def selective_scan_fn(u):
    return "upstream"

def selective_scan_ref(u):
    return "reference"

def mamba_inner_fn(xz):
    return "upstream"
"""

GENERATION = '''\
# Somebody's licence line
from dataclasses import dataclass
from typing import Optional

import torch
from transformers.generation import GreedySearchDecoderOnlyOutput, SampleDecoderOnlyOutput, TextStreamer


@dataclass
class Parameters:
    length: int = 0


def decode(input_ids, model, cg=False, enable_timing=False, top_k=1, streamer: Optional[TextStreamer] = None):
    """Decode."""
    start = torch.cuda.Event(enable_timing=enable_timing)
    end = torch.cuda.Event(enable_timing=enable_timing)
    start.record()
    end.record()
    if enable_timing:
        torch.cuda.synchronize()
    output = GreedySearchDecoderOnlyOutput if top_k == 1 else SampleDecoderOnlyOutput
    result = output(sequences=input_ids, scores=(start.elapsed_time(end),))
    return result, cg
'''

HUB = """\
import json

from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file


def load_config_hf(name):
    return json.load(open(cached_file(name, CONFIG_NAME)))


def without():
    return "no transformers needed"
"""

LAYER_NORM = """\
import torch
import triton
import triton.language as tl
from mamba_ssm.ops.triton.helpers import doubled

AUTOTUNED = [triton.Config({}, num_warps=n) for n in (1, 2)]

def layer_norm_ref(x):
    return doubled(x)

@triton.autotune(configs=AUTOTUNED, key=["N"])
@triton.jit
def _kernel(X, N: tl.constexpr):
    pass

def layer_norm_fn(x):
    return "upstream's kernel"

def only_upstream_has_this(x):
    _kernel[(1,)](x, 1)

class OnlyUpstreamFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return only_upstream_has_this(x)
"""

HELPERS = """\
import triton

def doubled(x):
    return 2 * x
"""

CONVOLUTION = """\
import causal_conv1d_cuda

def causal_conv1d_fn(x):
    return "upstream"

def causal_conv1d_update(x):
    return "upstream"
"""

VARLEN = """\
import torch

import triton
import triton.language as tl

@triton.jit
def _states(X, BLOCK: tl.constexpr):
    pass

def causal_conv1d_varlen_states(x):
    return "upstream"

def causal_conv1d_varlen_states_ref(x):
    return "reference"
"""

CPP_FUNCTIONS = """\
import torch

import causal_conv1d_cuda

LIBRARY = "Somebody"

@torch.library.custom_op(f"{LIBRARY}::_small_upstream_fwd", mutates_args={"out"})
def forward(x: torch.Tensor, out: torch.Tensor) -> None:
    causal_conv1d_cuda.causal_conv1d_fwd(x, out)
"""

HUB_MIXIN = "from huggingface_hub import PyTorchModelHubMixin\n\nclass Mamba2(PyTorchModelHubMixin):\n    pass\n"

PACKAGES: dict[str, dict[str, str]] = {
    "mamba_ssm": {
        "__init__.py": f'__version__ = "{VERSION}"\n',
        "ops/__init__.py": "",
        "ops/selective_scan_interface.py": SCAN,
        "ops/triton/__init__.py": "",
        "ops/triton/layer_norm.py": LAYER_NORM,
        "ops/triton/helpers.py": HELPERS,
        "modules/__init__.py": "",
        "modules/mamba2.py": HUB_MIXIN,
        "utils/__init__.py": "",
        "utils/generation.py": GENERATION,
        "utils/hf.py": HUB,
    },
    "causal_conv1d": {
        "__init__.py": f'__version__ = "{VERSION}"\nfrom causal_conv1d.causal_conv1d_interface import causal_conv1d_fn\n',
        "cpp_functions.py": CPP_FUNCTIONS,
        "causal_conv1d_interface.py": CONVOLUTION,
        "causal_conv1d_varlen.py": VARLEN,
    },
}


def pkg_info(name: str, version: str = VERSION) -> str:
    return (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: A small stand-in\nAuthor: Somebody Else\n"
        f"License-File: LICENSE\nRequires-Python: >=3.8\n\n# {name}\n"
    )


def members(name: str, version: str = VERSION) -> dict[str, bytes]:
    top = f"{name}-{version}"
    texts = {f"{top}/{name}/{path}": text for path, text in PACKAGES[name].items()}
    texts[f"{top}/PKG-INFO"] = pkg_info(name, version)
    texts[f"{top}/LICENSE"] = "A licence\n"
    texts[f"{top}/setup.py"] = "raise SystemExit('setup.py was executed')\n"
    texts[f"{top}/{name}.egg-info/requires.txt"] = "torch\npackaging\nninja\n" + (
        "transformers\ntriton\n\n[dev]\npytest\n" if name == "mamba_ssm" else ""
    )
    return {path: text.encode() for path, text in texts.items()}


def write_sdist(folder: Path, name: str, version: str = VERSION) -> Path:
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, content in members(name, version).items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_tree(folder: Path, name: str, version: str = VERSION) -> Path:
    """Write the content of the archive as a folder, and return its top folder."""
    for member, content in members(name, version).items():
        path = folder / member
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / f"{name}-{version}"


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that sees this interpreter's packages (torch, pip) and this checkout; return its python."""
    import sysconfig

    venv.EnvBuilder(with_pip=False, symlinks=venv_symlinks()).create(folder)
    windows = (folder / "Scripts").is_dir()
    python = folder / ("Scripts/python.exe" if windows else "bin/python")
    site = next((folder / "Lib").glob("site-packages")) if windows else next(folder.glob("lib/python*/site-packages"))
    seen = [sysconfig.get_path("purelib"), str(Path(anymamba.__file__).parents[1])]
    (site / "outside.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(seen)), encoding="utf-8")
    return python


def venv_symlinks() -> bool:
    import os

    return os.name != "nt"


def site_packages(python: Path) -> Path:
    prefix = python.parent.parent
    windows = prefix / "Lib" / "site-packages"
    return windows if windows.is_dir() else next(prefix.glob("lib/python*/site-packages"))
