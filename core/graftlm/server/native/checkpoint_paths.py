"""The folders from which administrators may have checkpoints and adapters loaded."""

import os
from pathlib import Path

from graftlm.config import EngineConfig
from graftlm.server.errors import ApiError

__all__ = ["CheckpointPaths"]


class CheckpointPaths:
    """Admits paths in `server.checkpoint_roots` and those that the configuration names itself.

    Links are followed before the comparison. A `~` is not expanded.
    """

    def __init__(self, config: EngineConfig) -> None:
        own = (config.model.path, *config.lora.adapters.values())
        self._own = frozenset(own)
        # The bundled model is named by no folder.
        folders = [path for path in (*own, *config.server.checkpoint_roots) if path != "demo"]
        self._roots = tuple(Path(os.path.realpath(os.path.expanduser(folder))) for folder in folders)

    def admit(self, path: str, param: str) -> str:
        """Return the path to load: what the configuration names as it is, any other without links.

        Raises:
            ApiError: 403, the path is outside. The answer is the same whether the path exists or not.
        """
        if path in self._own:
            return path
        try:
            resolved = Path(os.path.realpath(path))
        except (OSError, ValueError):  # a NUL in it, or half of a surrogate pair
            resolved = None
        if resolved is None or not any(resolved.is_relative_to(root) for root in self._roots):
            raise ApiError(
                403,
                f"{param} is outside the folders that clients may name; list its folder in server.checkpoint_roots",
                param=param,
                code="path_not_allowed",
            )
        return str(resolved)
