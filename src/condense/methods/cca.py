"""Core Context Aware attention (Chen et al., ICML 2025)."""

from dataclasses import dataclass
from typing import ClassVar

from condense.methods.grouped import GroupPooling


@dataclass(frozen=True, kw_only=True)
class CCA(GroupPooling):
    """Core Context Aware attention: a group becomes one core token by the weights of its last query.

    The defaults are the paper's (group 16, window 1024, keys and values weighted); see `GroupPooling` for
    the settings. Entries are made per KV head, of keys that the model has rotated already.
    """

    name: ClassVar[str] = "cca"
