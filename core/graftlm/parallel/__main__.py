"""Runs the process of a rank."""

from graftlm.parallel.rank_process import main

main()
