"""Embeddings, scores and classes out of hidden states."""
