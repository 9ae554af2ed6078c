"""Sets up a process: OpenMP runtime, huge pages, thread priorities, and a spare core."""
