"""The engine in process: prompts in, outputs out, over a thread that owns the step loop."""
