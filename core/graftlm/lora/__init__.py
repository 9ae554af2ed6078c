"""Low-rank adapters: their files, names and slots."""
