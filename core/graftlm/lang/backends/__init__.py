"""The backends that run a program's requests: an engine of this process, or a server."""
