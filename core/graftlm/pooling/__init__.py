"""Computes embeddings, scores and classes from hidden states."""
