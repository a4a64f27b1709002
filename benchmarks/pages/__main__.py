"""`python benchmarks/pages`: see `write_pages`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `speed`

from write_pages import main

main()
