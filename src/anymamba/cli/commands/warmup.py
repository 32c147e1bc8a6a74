"""anymamba warmup: compile the CUDA kernels for this card now, into the cache that every process uses."""

from __future__ import annotations

from typing import Annotated

import typer

from anymamba.cli.terminal import terminal

__all__ = ["command"]


def command(
    families: Annotated[
        list[str] | None, typer.Argument(help="Operator families, e.g. causal_conv1d selective_scan; default all.")
    ] = None,
    device: Annotated[int | None, typer.Option(help="PyTorch's index of the card; default the current one.")] = None,
    every: Annotated[
        bool, typer.Option("--every", help="All variants, not only those of the usual dtypes and options.")
    ] = False,
) -> None:
    """Compile the CUDA kernels for this card now, so that no first call waits for them."""
    from anymamba.backends.cuda import warmup

    screen = terminal()
    count, seconds = warmup(
        families or (),
        device=device,
        every=every,
        progress=lambda done, total, variant: screen.note(f"{done}/{total} {variant.kernel}"),
    )
    screen.say(f"{count} kernels ready in {seconds:.1f} s")
