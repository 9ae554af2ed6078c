"""The folders from which administrators may load checkpoints and adapters."""

import os
from pathlib import Path

from graftlm.config import EngineConfig
from graftlm.server.errors import ApiError

__all__ = ["CheckpointPaths"]


class CheckpointPaths:
    """Accepts paths inside `server.checkpoint_roots`, and the configured paths of the model and the adapters.

    Symbolic links are resolved before the comparison. A `~` in a client's path is not expanded.
    """

    def __init__(self, config: EngineConfig) -> None:
        own = (config.model.path, *config.lora.adapters.values())
        self._own = frozenset(own)
        # "demo" names the bundled model and is not a folder.
        folders = [path for path in (*own, *config.server.checkpoint_roots) if path != "demo"]
        self._roots = tuple(Path(os.path.realpath(os.path.expanduser(folder))) for folder in folders)

    def admit(self, path: str, param: str) -> str:
        """Return the path to load.

        Args:
            path: the path that the client sent.
            param: name of the request's field, for the error message.

        Returns: the path itself if it is in the configuration, else the path with all links resolved.

        Raises:
            ApiError: 403, the path is outside the folders. The answer does not reveal whether the path exists.
        """
        if path in self._own:
            return path
        try:
            resolved = Path(os.path.realpath(path))
        except (OSError, ValueError):  # the path contains a NUL or half of a surrogate pair
            resolved = None
        if resolved is None or not any(resolved.is_relative_to(root) for root in self._roots):
            raise ApiError(
                403,
                f"{param} is outside the folders that clients may use; list its folder in server.checkpoint_roots",
                param=param,
                code="path_not_allowed",
            )
        return str(resolved)
