"""Sequences longer than a card: the operators over a sequence that is sharded across ranks (context parallel).

    from anymamba.distributed import context_parallel, shard_sequence

    with context_parallel(group):
        logits = model(shard_sequence(tokens, group))

works with every model whose Mamba and Mamba-2 layers run on `anymamba.ops`, upstream's modules as they are among them.
Launching is torchrun's, the messages are torch.distributed's; docs/distributed.md says what travels and what it costs.
"""

from __future__ import annotations

from anymamba.distributed.context import ContextParallel, context_parallel, parallelize
from anymamba.distributed.shards import gather_sequence, shard_sequence
from anymamba.distributed.traffic import Traffic, count_traffic

__all__ = [
    "ContextParallel",
    "Traffic",
    "context_parallel",
    "count_traffic",
    "gather_sequence",
    "parallelize",
    "shard_sequence",
]
