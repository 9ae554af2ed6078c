"""Speculative decoding: calls drafters, chooses how many drafted tokens to verify, and counts accepted tokens."""

from graftlm.speculation.draft_budget import MAX_DRAFTED_TOKENS
from graftlm.speculation.speculator import DraftCounts, SourcedDraft, Speculator

__all__ = ["MAX_DRAFTED_TOKENS", "DraftCounts", "SourcedDraft", "Speculator"]
