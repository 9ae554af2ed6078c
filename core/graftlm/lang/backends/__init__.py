"""What runs a program's requests: an engine of this process, or a server."""
