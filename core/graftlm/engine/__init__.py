"""The in-process engine, which completes prompts with a step loop in a separate thread."""
