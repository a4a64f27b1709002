"""Tables of the page, as data: which model under which method makes each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from small_runs import WINDOW

FLEXIBLE = tuple(
    (f"{name} {value}", "mla-lca", f"{name}={value}" if value not in (16, WINDOW) else "own")
    for name, values in (("g", (4, 8, 16, 32)), ("w", (32, 64, 128, 256, 512)))
    for value in values
)
# rows of tables: label, beginning of the runs' names, method of the evaluation
TABLES: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "MLA": (
        ("dense, trained dense", "mla-dense", "own"),
        ("LCA, trained with LCA", "mla-lca", "own"),
        ("LCA, model trained dense", "mla-dense", "lca"),
        ("dense, model trained with LCA", "mla-lca", "dense"),
        ("window of as many entries, trained dense", "mla-dense", "window"),
        ("window of as many entries, trained with it", "mla-window", "own"),
        ("CCA on latents", "mla-cca", "own"),
        ("DGA on latents", "mla-dga", "own"),
    ),
    "MLA_SHORT": (
        ("dense", "mla-short-dense", "own"),
        ("LCA: streaming, rope keys select, latents weighted, log-size bias", "mla-short-lca", "own"),
        ("no bias", "mla-short-bias=none", "own"),
        ("summary by the last query", "mla-short-summary=last", "own"),
        ("rope keys weighted", "mla-short-pooling=weighted-weighted", "own"),
        ("both means", "mla-short-pooling=mean-mean", "own"),
        ("LCA, model trained dense", "mla-short-dense", "lca"),
        ("dense, model trained with LCA", "mla-short-lca", "dense"),
        ("window of as many entries, trained dense", "mla-short-dense", "window"),
    ),
    "MLA_DEFAULTS": (
        ("LCA: streaming, rope keys select, latents weighted, log-size bias", "mla-lca", "own"),
        ("no bias", "mla-bias=none", "own"),
        ("summary by the last query", "mla-summary=last", "own"),
        ("summary of the prompt's end, not trained with it", "mla-lca", "summary=prompt"),
        ("rope keys weighted", "mla-pooling=weighted-weighted", "own"),
        ("both means", "mla-pooling=mean-mean", "own"),
    ),
    "MLA_SIZES": (
        *((f"g {g}", f"mla-g={g}" if g != 16 else "mla-lca", "own") for g in (4, 8, 16, 32)),
        *((f"w {w}", f"mla-w={w}" if w != WINDOW else "mla-lca", "own") for w in (32, 64, 128, 256, 512)),
        *((f"{n} summary queries", f"mla-queries={n}" if n != 16 else "mla-lca", "own") for n in (4, 8, 16, 32)),
    ),
    "MLA_FLEXIBLE": FLEXIBLE,
    "MLA_SHORT_FLEXIBLE": tuple((label, "mla-short-lca", method) for label, _, method in FLEXIBLE),
    "LLAMA": (
        ("dense", "llama-dense", "own"),
        ("CCA: weighted, last query", "llama-cca", "own"),
        ("CCA with log-size bias", "llama-cca-bias", "own"),
        ("LCA: keys select, values weighted, streaming, no bias", "llama-bias=none", "own"),
        ("LCA with log-size bias", "llama-lca", "own"),
        ("DGA: g 16, gamma 0.1, last query", "llama-dga", "own"),
        ("DGA, streaming summary, log-size bias", "llama-dga-streaming-bias", "own"),
        ("window of as many entries as LCA, trained with it", "llama-window", "own"),
    ),
    "EQUAL": (
        ("LCA, g 16", "llama-lca", "own"),
        ("DGA, 1 focal token in 33, streaming, bias", "llama-dga-sparse", "own"),
        ("the same with anchored groups", "llama-anchored-sparse", "own"),
        ("LCA, g 6", "llama-lca-g=6", "own"),
        ("DGA, 2 focal tokens in 18, streaming, bias", "llama-dga-streaming-bias", "own"),
        ("the same with anchored groups", "llama-anchored", "own"),
    ),
    "DGA": (
        *((f"m {m}", f"llama-dga-m={m}" if m != 16 else "llama-dga", "own") for m in (4, 8, 16, 32, 64)),
        *(
            (f"gamma {gamma}", f"llama-dga-gamma={gamma}" if gamma != 0.1 else "llama-dga", "own")
            for gamma in (0.1, 0.3, 0.5, 0.7, 0.9)
        ),
        ("focal tokens at random", "llama-dga-random", "own"),
    ),
    "COMPLEMENTARY": (
        ("prompt selection, trained streaming", "llama-dga", "prompt"),
        ("without complementary tokens", "llama-dga", "prompt, not complementary"),
        ("prompt selection, trained with it", "llama-prompt", "own"),
        ("without complementary tokens, trained so", "llama-prompt-not-complementary", "own"),
    ),
}
