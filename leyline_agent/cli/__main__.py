"""`python -m leyline_agent.cli` is the same as `leyline`."""

from leyline_agent.cli.main import main

main()
