"""Finds a checkpoint: a folder in Hugging Face layout, or a GGUF file."""

import re
from pathlib import Path

from graftlm.checkpoint.json_files import listed, listing
from graftlm.errors import CheckpointError
from graftlm.shortening import shortened

__all__ = ["cached_snapshot", "checkpoint_files", "is_gguf", "is_hub_name", "resolve_checkpoint"]

_SHOWN_CHARS = 200
_DEMO = "demo"
_DEMO_HEAD = "demo-eagle3"
_GGUF = ".gguf"
#: A model's name on a hub: organisation/model.
_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
#: File name of a part of a model that llama.cpp has split: model-00001-of-00003.gguf.
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def resolve_checkpoint(path: str, setting: str = "model.path") -> Path:
    """Return the folder or file of `model.path`: "demo", a folder, a .gguf file, or the name of a cached model.

    "demo-eagle3" is the EAGLE-3 head of the model "demo".
    A model of a hub is searched only in the local cache of `huggingface_hub`; nothing is downloaded.

    Args:
        path: value of the setting.
        setting: name of the setting, for messages.

    Raises:
        CheckpointError: there is no such folder or file, or the folder has no config.json.
    """
    if path in (_DEMO, _DEMO_HEAD):
        from graftlm.demo import demo_checkpoint, demo_draft_head

        place = demo_checkpoint() if path == _DEMO else demo_draft_head()
    else:
        place = _expanded(path, setting)
        if is_hub_name(path):
            place = cached_snapshot(path) or place
    if place.is_file():
        return _checked_file(place, setting)
    if not place.is_dir():
        raise CheckpointError(
            f"No checkpoint at {path!r}: looked for the folder {place.absolute()}. {setting} must be 'demo', a folder "
            f"with config.json and model.safetensors, a .gguf file, or the name of a model in the local Hugging Face "
            f"cache; download it with `hf download NAME`, or set model.download"
        )
    if not (place / "config.json").is_file():
        gguf_files = sorted(place.glob(f"*{_GGUF}"))
        hint = f". For GGUF set {setting} to the file: {gguf_files[0]}" if gguf_files else ""
        raise CheckpointError(f"No checkpoint in {place}: looked for config.json, found {listing(place)}{hint}")
    return place


def is_hub_name(path: str) -> bool:
    """Return whether `model.path` has the form of a hub's model, organisation/model, and is no local path."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of a hub's model in the local cache, which may lack files; None if there is no such folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        incomplete = getattr(error, "snapshot_path", None)  # set if the folder lacks files, even unnecessary ones
        return None if incomplete is None else Path(incomplete)


def _expanded(path: str, setting: str) -> Path:
    """Return a path with expanded `~`.

    Raises:
        CheckpointError: the path is invalid.
    """
    try:
        place = Path(path).expanduser()
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the caller reports a missing file
    except (OSError, ValueError, RuntimeError) as error:  # too long, contains NUL, unknown home folder
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{setting} {shortened(repr(path), _SHOWN_CHARS)} cannot be a checkpoint: {reason}"
        ) from error
    return place


def is_gguf(path: Path) -> bool:
    """Return whether a checkpoint is a GGUF file and not a folder."""
    return path.suffix == _GGUF and path.is_file()


def checkpoint_files(path: Path) -> list[Path]:
    """Return a checkpoint's weight files in a fixed order; empty for a folder without weights.

    Raises:
        CheckpointError: a part of a split GGUF file is missing.
    """
    return _gguf_parts(path) if is_gguf(path) else sorted(path.glob("*.safetensors"))


def _checked_file(file: Path, setting: str) -> Path:
    if file.suffix != _GGUF:
        raise CheckpointError(
            f"{file} is a file, but not a .gguf file. {setting} must be 'demo', a folder with config.json and "
            f"model.safetensors, or a .gguf file"
        )
    return file


def _gguf_parts(file: Path) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(file.name)
    if match is None:
        return [file]
    if int(match["number"]) != 1:
        raise CheckpointError(f"{file} is a part of a model. Set model.path to the first part, with the number 00001")
    names = [f"{match['stem']}-{i + 1:05}-of-{match['count']}{_GGUF}" for i in range(int(match["count"]))]
    parts = [file.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{file.parent} lacks {listed(missing)}, which are parts of {file.name}")
    return parts
