"""From a configuration to the parts of an engine."""
