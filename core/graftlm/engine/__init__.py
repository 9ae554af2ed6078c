"""The in-process engine. It runs a step loop in a thread."""
