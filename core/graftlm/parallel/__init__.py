"""Execution on several ranks: the communicator between ranks, and the messages between a scheduler and its ranks."""
