"""The guide's pair from the user's own index, ported, imported and run in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anymamba.upstream import patches
from anymamba.upstream.archive import unpack
from anymamba.upstream.environment import inspect_environment, run_in
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.plan import make_plan
from anymamba.upstream.progress import Silent
from anymamba.upstream.transaction import install, uninstall
from small_upstream import make_environment

pytestmark = pytest.mark.network

SCRIPT = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
for absent in ("triton", "transformers", "huggingface_hub"):
    sys.modules[absent] = None
import torch
torch.manual_seed(0)
from mamba_ssm import Mamba, Mamba2, MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
x = torch.randn(2, 64, 16)
print(Mamba(d_model=16, d_state=16, d_conv=4, expand=2)(x).shape)
print(Mamba2(d_model=16, d_state=16, headdim=8, chunk_size=32)(x).shape)
config = MambaConfig(d_model=16, n_layer=2, vocab_size=50, ssm_cfg={"layer": "Mamba1"}, rms_norm=True, fused_add_norm=True)
model = MambaLMHeadModel(config).eval()
prompt = torch.randint(0, 50, (1, 5))
out = model.generate(prompt, max_length=12, cg=True, return_dict_in_generate=True, output_scores=True, enable_timing=True)
whole = model(out.sequences[:, :-1].clone()).logits[:, 4:]
torch.testing.assert_close(torch.stack(out.scores, 1)[..., :50], whole[..., :50], rtol=1e-3, atol=1e-3)
print(out.sequences.shape)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("real") / "环 境")


def test_the_guides_pair_is_installed_proved_and_taken_back(python: Path) -> None:
    plan = make_plan([], python)
    assert all(package.hash_from == "lock" for package in plan.packages)
    assert install(plan).proof["guide"] == [2, 64, 16]
    result = run_in(str(python), ["-c", SCRIPT])
    assert result.returncode == 0, result.stderr[-3000:]
    shapes = [line for line in result.stdout.splitlines() if line.startswith("torch.Size")]
    assert shapes == ["torch.Size([2, 64, 16])", "torch.Size([2, 64, 16])", "torch.Size([1, 12])"]
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "2.2.2+anymamba.1" in listed and "1.4.0+anymamba.1" in listed
    uninstall(python)
    assert inspect_environment(python).installed == {}


@pytest.mark.parametrize(("name", "version"), [("mamba_ssm", "2.2.2"), ("causal_conv1d", "1.4.0")])
def test_every_rule_fits_the_real_text_once(tmp_path: Path, python: Path, name: str, version: str) -> None:
    package = next(p for p in make_plan([f"{name}=={version}"], python).packages if p.name == name)
    with Index(read_pip_settings(Path(sys.executable))) as index:
        found = next(found for found in index.find(name) if found.file == package.file)
        archive = index.download(found, package.sha256, Silent())
    source = unpack(archive, tmp_path)
    first = patches.apply(source / name, name, version)
    assert {done.rule for done in first} == {rule.id for rule in patches.rules_for(name, version)}
    assert {done.outcome for done in first} == {"edited"}
    assert {done.outcome for done in patches.apply(source / name, name, version)} == {"already there"}
