"""Entry point of a child process of `graftlm serve`, run with `python -m graftlm.processes`."""

from graftlm.processes.child import main

main()
