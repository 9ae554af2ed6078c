"""What a process asks of its machine: an OpenMP runtime, huge pages, threads, a spare core."""
