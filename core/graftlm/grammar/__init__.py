"""Grammars of requests: which backend compiles them, and the cache of compiled ones."""
