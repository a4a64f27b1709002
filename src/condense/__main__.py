"""`python -m condense`: the command line."""

from condense_command import main

main()
