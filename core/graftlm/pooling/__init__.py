"""Embeddings, scores and classes from hidden states."""
