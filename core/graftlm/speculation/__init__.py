"""Speculative decoding: calls drafters, chooses how many drafted tokens to verify, and counts accepted tokens."""

from graftlm.speculation.speculator import DraftCounts, SourcedDraft, Speculator

__all__ = ["DraftCounts", "SourcedDraft", "Speculator"]
