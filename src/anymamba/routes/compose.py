"""The Dockerfile, and a compose file that builds it, gives it the GPU and keeps its kernel cache."""

from __future__ import annotations

from anymamba.routes import dockerfile
from anymamba.routes.choice import Choice
from anymamba.routes.files import File, template

__all__ = ["files"]

_GPU = """\
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: all
              capabilities: [gpu]"""


def files(choice: Choice) -> list[File]:
    """Return compose.yaml and what the Dockerfile route returns."""
    return [File("compose.yaml", template("compose.yaml", gpu=_GPU if choice.gpu else "")), *dockerfile.files(choice)]
