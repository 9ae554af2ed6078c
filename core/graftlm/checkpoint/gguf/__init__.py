"""Reads GGUF files of llama.cpp: metadata as a config.json, tensors with their Hugging Face names."""

from graftlm.checkpoint.gguf.config import load_gguf_config
from graftlm.checkpoint.gguf.weights import iter_gguf_weights

__all__ = ["iter_gguf_weights", "load_gguf_config"]
