"""A checkpoint on disk: its location, its configuration, and its tensors, one at a time.

torch is imported only when tensors are read, so that a command line can read a configuration without it.
"""

from graftlm.checkpoint.download import download_model
from graftlm.checkpoint.json_files import read_json
from graftlm.checkpoint.location import (
    cached_snapshot,
    checkpoint_files,
    is_gguf,
    is_hub_name,
    resolve_checkpoint,
)
from graftlm.checkpoint.model_config import DTYPES, load_model_config, torch_dtype
from graftlm.checkpoint.progress import watch_reading
from graftlm.checkpoint.safetensors_files import read_tensors
from graftlm.checkpoint.same_model import check_same_model
from graftlm.checkpoint.same_vocabulary import check_same_vocabulary
from graftlm.checkpoint.sizes import check_sizes
from graftlm.checkpoint.text_part import text_weights, tower_weights
from graftlm.checkpoint.weights import iter_weights

__all__ = [
    "DTYPES",
    "cached_snapshot",
    "check_same_model",
    "check_same_vocabulary",
    "check_sizes",
    "checkpoint_files",
    "download_model",
    "is_gguf",
    "is_hub_name",
    "iter_weights",
    "load_model_config",
    "read_json",
    "read_tensors",
    "resolve_checkpoint",
    "text_weights",
    "torch_dtype",
    "tower_weights",
    "watch_reading",
]
