"""Chooses the grammar backends of requests, and caches compiled grammars."""
