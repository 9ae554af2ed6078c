"""Assembles an engine's parts from a configuration."""
