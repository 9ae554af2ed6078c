"""LoRA adapters, with their files, names and slots."""
