"""Assembly of an engine's parts from a configuration."""
