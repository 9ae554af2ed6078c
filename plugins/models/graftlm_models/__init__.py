"""Placeholder for the build; replaced below."""
