"""Grammars of requests: the choice of their backend, and the cache of compiled grammars."""
