"""The sources of Recall's attention.

Shapes: B rows, K KV heads, G groups of g tokens, N window tokens, D and Dv widths.
"""

from typing import Literal, NamedTuple

from condense.ops.spans import Source, Spans

Unchosen = Literal["pool", "drop"]


class RecallSources(NamedTuple):
    """The sources that queries attend to, all in one dtype; keys and values must be finite, seen or not.

    entries: k ``[B, K, G, D]``, v ``[B, K, G, Dv]``, one per group, and their bias. store: k ``[B, K, G * g, D]``, v
    ``[B, K, G * g, Dv]``, the exact tokens: those of group j stand in columns ``[j * g, (j + 1) * g)``, groups counted
    from a row's first real token. window: k ``[B, K, N, D]``, v ``[B, K, N, Dv]``. spans: of entries
    (``[0, closed groups)``) and window, those of a `condense.ops.spans.UniformRule`; queries at padding see nothing.
    """

    entries: Source
    store: Source
    window: Source
    spans: Spans

    @property
    def group_size(self) -> int:
        """Tokens per group, g; 0 without groups."""
        G = self.entries.k.shape[2]
        return self.store.k.shape[2] // G if G > 0 else 0
