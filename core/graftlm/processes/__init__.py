"""The server's processes, and what passes between them."""
