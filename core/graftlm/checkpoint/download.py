"""Downloads a model of a hub into the local cache of `huggingface_hub`."""

import logging

from graftlm.checkpoint.location import cached_snapshot, is_hub_name
from graftlm.errors import CheckpointError

__all__ = ["download_model"]

logger = logging.getLogger(__name__)

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_CODE = ["*.py"]
#: Copies of the weights in other formats, which some repositories have in addition.
_COPIES = ["original/*", "consolidated*", "onnx/*", "openvino/*"]


def download_model(path: str, *, with_code: bool = False) -> None:
    """Download a hub's model, or the files of it that the local cache lacks. Progress bars are on standard error.

    Nothing is downloaded if the path is "demo", a folder or a file. If the hub cannot be reached, a model in the cache
    is used.

    Args:
        path: value of `model.path`.
        with_code: whether Python files are downloaded too; they are needed for `model.trust_remote_code`.

    Raises:
        CheckpointError: the hub has no such model, or refuses access, or cannot be reached, and the cache does not have
            the model; or the cache cannot be written.
    """
    if not is_hub_name(path):
        return
    from huggingface_hub import snapshot_download

    patterns = [*_FILES, *(_CODE if with_code else [])]
    try:
        snapshot_download(path, allow_patterns=patterns, ignore_patterns=_COPIES)
    except Exception as error:  # the HTTP client's errors differ between versions of the library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if cached_snapshot(path) is None:
            raise CheckpointError(f"model.path {path!r} cannot be downloaded: {reason:.500}") from error
        logger.warning("%s cannot be downloaded (%.500s); the model in the local cache is used", path, reason)
