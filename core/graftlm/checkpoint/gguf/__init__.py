"""GGUF files, as llama.cpp has them: metadata as a config.json, tensors under their names in Hugging Face's layout."""

from graftlm.checkpoint.gguf.config import load_gguf_config
from graftlm.checkpoint.gguf.weights import iter_gguf_weights

__all__ = ["iter_gguf_weights", "load_gguf_config"]
