"""Other people's ways to read long prompts, to compare with: eviction after the prompt, and sparse prefill.

They put themselves in by public hooks alone (`condense.Method`); nothing else in the package knows them.
"""

from condense.baselines.flex_prefill import FlexPrefill
from condense.baselines.minference import AShape, BlockSparse, MInference, VerticalSlash
from condense.baselines.snapkv import SnapKV
from condense.baselines.sparse_prefill import SparsePrefill
