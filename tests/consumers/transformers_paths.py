"""transformers beside the port: its fast path taken, its own slow path taken, in both of its generations.

transformers 5 looks for the packages when a model's file is imported and takes what it finds, on a CPU too. transformers 4 asks
for a card twice: `torch.cuda.is_available()` when the file is imported, the weight's device in every forward. On a CPU its fast
path is reached here by answering the first with yes, for the time of the imports, and by calling a mixer's own
`cuda_kernels_forward`: its text, on CPU tensors. On a card nothing is changed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch

from consumers.small_models import MODELS

__all__ = ["FOURTH", "forget_models", "import_models", "slow_path", "take_fast_path"]


def _generation() -> int:
    import transformers

    return int(transformers.__version__.partition(".")[0])


FOURTH = _generation() == 4
"""Whether this is the generation that takes its fast path on a card only."""


def import_models() -> list[str]:
    """Import the files of all models that this release has, as the fast path needs it; return their names."""
    import transformers

    with ExitStack() as stack:
        if FOURTH and not torch.cuda.is_available():
            stack.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
        found = [name for name in MODELS if hasattr(transformers, f"{name}ForCausalLM")]
        for name in found:
            module = importlib.import_module(getattr(transformers, f"{name}ForCausalLM").__module__)
            with suppress(AttributeError):
                module._lazy_load_causal_conv1d()  # it keeps what it finds the first time
    return found


def forget_models() -> None:
    """Let the next import of a model's file look for the packages anew."""
    for name in [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]:
        if any(name.rpartition(".modeling_")[2].replace("_", "").startswith(model.lower()) for model in MODELS):
            del sys.modules[name]


def _mixers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "cuda_kernels_forward")]


def take_fast_path(model: Any) -> Any:
    """Make a model of transformers 4 on a CPU do what it does on a card; any other does it by itself."""
    for mixer in _mixers(model):
        if FOURTH and next(mixer.parameters()).device.type == "cpu":
            mixer.forward = mixer.cuda_kernels_forward
        if type(mixer).__name__ == "Zamba2MambaMixer" and FOURTH:
            mixer.time_step_min = 0.0  # below it only the slow path cuts off
    return model


@contextmanager
def slow_path(model: Any) -> Iterator[None]:
    """Run what transformers itself wrote in PyTorch for the functions that it takes from packages."""
    module = importlib.import_module(type(model).__module__)
    with ExitStack() as stack:
        if FOURTH:
            for name in (
                "is_fast_path_available",
                "selective_state_update",
            ):  # the second where the first is a local one
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, None))
            for mixer in _mixers(model):
                taken = mixer.__dict__.pop("forward", None)
                if taken is not None:
                    stack.callback(setattr, mixer, "forward", taken)
                if hasattr(mixer, "use_fast_kernels"):
                    stack.enter_context(mock.patch.object(mixer, "use_fast_kernels", False))
        else:
            words = ("causal_conv1d", "selective", "split_conv1d", "chunk_scan", "inner_fn")
            fast = {
                name: function
                for name, function in vars(module).items()
                if inspect.isfunction(function)
                and hasattr(function, "__wrapped__")
                and any(word in name for word in words)
            }
            assert len(fast) >= 4, "transformers arranges its functions differently now"
            for name, function in fast.items():
                stack.enter_context(mock.patch.object(module, name, function.__wrapped__))
        yield
