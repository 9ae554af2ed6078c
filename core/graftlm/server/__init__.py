"""The HTTP server in front of the engine."""
