"""A report carries no names and no secrets, and never overwrites unasked."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from anymamba.errors import OptionError
from anymamba.faults import explain
from anymamba.faults.report import write_report
from anymamba.faults.scrub import scrub

TOKEN = "ghp_" + "a1B2" * 9


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (r"C:\Users\wang\AppData\Local", r"C:\Users\USER\AppData\Local"),
        (r"C:\\Users\\Wang Wei\\x.py", r"C:\\Users\\USER\\x.py"),
        ("c:/users/王伟/x.py", "c:/users/USER/x.py"),
        ("/mnt/c/Users/wang/x", "/mnt/c/Users/USER/x"),
        ("/c/Users/wang/x", "/c/Users/USER/x"),
        ("/home/wang/miniconda3/lib", "/home/USER/miniconda3/lib"),
        ("'/Users/wang'", "'/Users/USER'"),
        ("https://wang:pw123@mirror.example/simple", "https://CREDENTIALS@mirror.example/simple"),
        (f"token {TOKEN} used", "token TOKEN used"),
        ("HF_TOKEN=abc123", "HF_TOKEN=SECRET"),
        ('"password": "hunter2"', '"password": "SECRET"'),
        ("pip --password hunter2 x", "pip --password SECRET x"),
        ("Authorization: Bearer abc.def", "Authorization: SECRET"),
        ("mail wang.wei@example.com now", "mail EMAIL now"),
        ("connect to 192.168.3.14:8080", "connect to IP:8080"),
        ("worker on lab-gpu-7 died", "worker on NAME died"),
        ("user wangwei logged in", "user NAME logged in"),
    ],
)
def test_names_and_secrets_go(text: str, clean: str) -> None:
    assert scrub(text, environ={}, names=("wangwei", "lab-gpu-7")) == clean


@pytest.mark.parametrize(
    "text",
    [
        "causal_conv1d.cpp(159): error C2146: syntax error: missing ')' before identifier 'and'",
        "torch 2.1.1+cu118, nvcc V11.8.89, Visual Studio 17.14.36119.2, SDK 10.0.22621.0",
        "/usr/local/cuda/bin/nvcc -gencode arch=compute_80,code=sm_80",
        "http://127.0.0.1:8000",
        "tokenizer = AutoTokenizer.from_pretrained(name)",
    ],
)
def test_what_explains_the_fault_stays(text: str) -> None:
    assert scrub(text, environ={}, names=("root", "py")) == text


def test_secrets_of_the_environment_go_wherever_they_stand() -> None:
    assert scrub("said s3cretvalue twice", environ={"MY_API_KEY": "s3cretvalue"}, names=()) == "said SECRET twice"


def test_the_bundle_holds_log_answer_and_machine_scrubbed(tmp_path: Path) -> None:
    log = b"C:\\Users\\wangwei\\x.py\r\nModuleNotFoundError: No module named 'selective_scan_cuda'\r\n"
    path = tmp_path / "report.zip"
    write_report(path, explain(log), machine=lambda: {"home": "C:\\Users\\wangwei"})
    with zipfile.ZipFile(path) as bundle:
        texts = {name: bundle.read(name).decode("utf-8") for name in bundle.namelist()}
    assert set(texts) == {"README.txt", "log.txt", "answer.json", "machine.json"}
    assert not any("wangwei" in text for text in texts.values())
    assert json.loads(texts["answer.json"])["findings"][0]["id"] == "extension-missing"
    assert json.loads(texts["machine.json"]) == {"home": "C:\\Users\\USER"}
    assert "      2 ModuleNotFoundError" in texts["log.txt"]


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "report.zip"
    path.write_bytes(b"mine")
    with pytest.raises(OptionError, match="exists"):
        write_report(path, explain(b""), machine=dict)
    assert path.read_bytes() == b"mine"
    write_report(path, explain(b""), machine=dict, overwrite=True)
    assert zipfile.is_zipfile(path)
