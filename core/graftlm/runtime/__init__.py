"""Sets up a process: OpenMP runtime, huge pages, idle-priority threads, a spare core, and reports about kernels."""
