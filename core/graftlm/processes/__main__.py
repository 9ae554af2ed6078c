"""`python -m graftlm.processes`: a child process of `graftlm serve`."""

from graftlm.processes.child import main

main()
