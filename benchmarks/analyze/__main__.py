"""`python benchmarks/analyze`: see `analyze.command`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from analyze.command import main

main()
