"""Speculative decoding: calls the drafters, chooses how many drafted tokens are verified, and counts accepted ones."""

from graftlm.speculation.speculator import DraftCounts, SourcedDraft, Speculator

__all__ = ["DraftCounts", "SourcedDraft", "Speculator"]
