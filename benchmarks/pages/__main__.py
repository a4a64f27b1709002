"""`python benchmarks/pages`: see `write_pages`."""

from write_pages import main

main()
