"""Tiny random configurations of transformers' models with Mamba layers, for the tests and the benchmark beside them."""

from __future__ import annotations

from typing import Any

__all__ = ["MAMBA_1", "MODELS", "draw_model"]

# weights large enough that no part's gradient vanishes
_COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
_WIDE = {"hidden_size": 16, "intermediate_size": 24}
_MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}

MODELS: dict[str, dict[str, Any]] = {
    "Mamba": {"hidden_size": 16, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4},
    "FalconMamba": {"hidden_size": 16, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4},
    "Mamba2": {
        "hidden_size": 16, "state_size": 8, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 2,
        "chunk_size": 8,
    },
    "Jamba": {
        **_WIDE, **_ATTENTION, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "Zamba": {
        **_WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 8, "num_hidden_layers": 3,
        "n_mamba_heads": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "Zamba2": {
        **_WIDE, "num_attention_heads": 4, "num_hidden_layers": 2, "mamba_d_state": 8, "mamba_ngroups": 1,
        "n_mamba_heads": 4, "mamba_headdim": 8, "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1, "adapter_rank": 4,
    },
    "Bamba": {**_WIDE, **_ATTENTION, **_MAMBA_2, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "FalconH1": {**_WIDE, **_ATTENTION, **_MAMBA_2, "num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 32},
    "GraniteMoeHybrid": {
        **_WIDE, **_ATTENTION, **_MAMBA_2, "shared_intermediate_size": 24, "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 2,
    },
    "NemotronH": {
        **_WIDE, **_ATTENTION, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
}  # fmt: skip
"""Class name in transformers, and what makes it small."""

MAMBA_1 = ("Mamba", "FalconMamba", "Jamba", "Zamba")
"""Those whose layers are Mamba-1's."""


def draw_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Build a model of transformers with random weights, the same each time."""
    import torch
    import transformers

    torch.manual_seed(seed)
    wanted = {**_COMMON, **MODELS[name], **changes}
    if name == "Zamba" and transformers.__version__.startswith("4."):  # it works its layers' types out by itself
        del wanted["layers_block_type"]
    config = getattr(transformers, f"{name}Config")(**wanted)
    return getattr(transformers, f"{name}ForCausalLM")(config)
