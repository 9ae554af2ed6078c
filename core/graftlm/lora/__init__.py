"""LoRA adapters: files, names and slots."""
