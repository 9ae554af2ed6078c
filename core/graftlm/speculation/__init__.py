"""Speculative decoding: which drafters run, how many of their tokens pay, and how often they were right."""

from graftlm.speculation.speculator import DraftCounts, SourcedDraft, Speculator

__all__ = ["DraftCounts", "SourcedDraft", "Speculator"]
