"""`python benchmarks/speed`: see `speed.command`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from speed.command import main

main()
