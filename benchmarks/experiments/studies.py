"""What is trained and measured, as data: models, runs, and the questions that they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from candidates import AnchoredDGA

from condense import CCA, DGA, LCA, Dense, Method, StreamingLLM
from condense.ops import POOLINGS
from condense.train import PhaseConfig
from condense.train.recipes import DEMO_ARCHITECTURE, TINY_MLA_ARCHITECTURE

LENGTH = 2048
WINDOW = 128
STEPS = 1500
LONG = 2500  # with latents retrieval appears later
SEEDS = (0, 1, 2)

_POSITIONS: Mapping[str, Any] = {"max_position_embeddings": 16384}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": DEMO_ARCHITECTURE,
    "mla": TINY_MLA_ARCHITECTURE,
    # for longer texts; the second with four query heads per KV head
    "llama-16k": {**DEMO_ARCHITECTURE, **_POSITIONS},
    "gqa4-16k": {**DEMO_ARCHITECTURE, **_POSITIONS, "num_attention_heads": 8, "num_key_value_heads": 2},
    "mla-16k": {**TINY_MLA_ARCHITECTURE, **_POSITIONS},
    # GPT-2 small and OPT-125M with the bundled vocabulary of 4,096 tokens, without dropout
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 4096,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": 4096,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "dropout": 0.0,
    },
}


@dataclass(frozen=True)
class Run:
    """One training run and what is measured on its model.

    name: unique. architecture: of `ARCHITECTURES`. seed: of weights and sequences. phase: how it is trained. base: the
    run whose model it starts from, None: random weights. methods: what the model is evaluated with, by label; empty:
    the model only serves as a base. curve: steps between validation losses during training, None: none are taken.
    noise: whether the effect of noise on keys is measured.
    """

    name: str
    architecture: str
    seed: int
    phase: PhaseConfig
    base: str | None = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    curve: int | None = None
    noise: bool = False


def base_run(architecture: str, seed: int) -> Run:
    """A dense model that retrieves from short texts."""
    phase = PhaseConfig(
        name="dense", steps=STEPS, sequence_length=512, batch_size=128, learning_rate=2e-3, warmup_steps=100,
        task_share=0.6, keys=(2, 8), checkpoint_steps=10**6, logging_steps=100,
    )  # fmt: skip
    return Run(f"{architecture}-base-s{seed}", architecture, seed, phase)


def adapted(
    architecture: str, label: str, method: Method, seed: int = 0, *, more: Mapping[str, Method] | None = None,
    noise: bool = False, steps: int = STEPS,
) -> Run:  # fmt: skip
    """The dense model trained on with a method, on longer texts; ``more``: what else its model is evaluated with."""
    phase = PhaseConfig(
        name="adapt", steps=steps, sequence_length=LENGTH, batch_size=16,
        mix="dense" if isinstance(method, Dense) else "condensed", method=method,
        learning_rate=1.5e-3, warmup_steps=100, task_share=0.8, keys=(4, 18), checkpoint_steps=10**6, logging_steps=100,
    )  # fmt: skip
    base = f"{architecture}-base-s{seed}"
    methods = {"own": method, **(more or {})}
    return Run(f"{architecture}-{label}-s{seed}", architecture, seed, phase, base, methods, noise=noise)


def from_scratch(architecture: str, label: str, method: Method, seed: int) -> Run:
    """1,000 steps on plain text from random weights, with validation losses on the way."""
    length, batch, rate, warmup = {
        "gpt2": (1024, 32, 2e-4, 20),
        "opt": (2048, 16, 8e-5, 50),
        "llama": (LENGTH, 16, 2e-3, 100),
        "mla": (LENGTH, 16, 2e-3, 100),
    }[architecture]
    phase = PhaseConfig(
        name="scratch", steps=1000, sequence_length=length, batch_size=batch,
        mix="dense" if isinstance(method, Dense) else "condensed", method=method,
        learning_rate=rate, warmup_steps=warmup, task_share=0.0, checkpoint_steps=10**6, logging_steps=100,
    )  # fmt: skip
    return Run(f"{architecture}-scratch-{label}-s{seed}", architecture, seed, phase, methods={"own": method}, curve=100)


def lca(**settings: Any) -> LCA:
    """Latents weighted, rope keys anchored, streaming summary, log-size bias, unless the settings say otherwise."""
    return LCA(**{"window": WINDOW, "rep_bias": "log_size", **settings})


def dga(**settings: Any) -> DGA:
    """Streaming DGA with the window of the others."""
    return DGA(**{"window": WINDOW, **settings})


# as many entries as groups of 16 behind the window leave of 2,048 tokens: (2048 - 128) / 16 + 128
SAME_CACHE = StreamingLLM(sink=4, window=244)
# 2 entries of 33 tokens: as many entries as one of 16
SPARSE_DGA: Mapping[str, Any] = {"group_size": 32, "gamma": 1 / 32}


def changed_at_inference() -> Mapping[str, Method]:
    """What a model trained with `lca` is evaluated with besides."""
    return {
        "dense": Dense(),
        "window": SAME_CACHE,
        **{f"g={g}": lca(group_size=g) for g in (4, 8, 32)},
        **{f"w={w}": lca(window=w) for w in (32, 64, 256, 512)},
        "summary=prompt": lca(summary="prompt", allow_future=True),
    }


def mla_runs(seed: int) -> list[Run]:
    """LCA in a model with latents: what decides a default, for one seed."""
    settings: dict[str, Method] = {
        "bias=none": lca(rep_bias="none"),
        "summary=last": lca(summary="last"),
        "pooling=weighted-weighted": lca(key_pooling="weighted"),
        "pooling=mean-mean": lca(key_pooling="mean", value_pooling="mean"),
    }
    if seed == 0:
        settings |= {"window": SAME_CACHE, "dga": dga(), "cca": CCA(window=WINDOW)}
        settings |= {f"g={g}": lca(group_size=g) for g in (4, 8, 32)}
        settings |= {f"w={w}": lca(window=w) for w in (32, 64, 256, 512)}
        settings |= {f"queries={n}": lca(num_summary_queries=n) for n in (4, 8, 32)}
        settings |= {
            f"pooling={key}-{value}": lca(key_pooling=key, value_pooling=value)
            for key, value in product(POOLINGS, POOLINGS)
            if (key, value) != ("select", "weighted")
        }
    return [
        adapted("mla", "lca", lca(), seed, more=changed_at_inference(), steps=LONG),
        adapted("mla", "dense", Dense(), seed, more={"lca": lca(), "window": SAME_CACHE}, steps=LONG),
        *(adapted("mla", label, method, seed, steps=LONG) for label, method in settings.items()),
    ]


def short_mla_runs(seed: int) -> list[Run]:
    """The same with the schedule of the other models, in which retrieval barely appears: who is early?"""
    settings = {
        "lca": lca(),
        "dense": Dense(),
        "bias=none": lca(rep_bias="none"),
        "summary=last": lca(summary="last"),
        "pooling=weighted-weighted": lca(key_pooling="weighted"),
        "pooling=mean-mean": lca(key_pooling="mean", value_pooling="mean"),
    }
    more = {"lca": changed_at_inference(), "dense": {"lca": lca(), "window": SAME_CACHE}}
    return [adapted("mla", f"short-{label}", method, seed, more=more.get(label)) for label, method in settings.items()]


def llama_runs(seed: int) -> list[Run]:
    """CCA, LCA and DGA in a model with ordinary keys: for one seed."""
    focal = dga(summary="streaming", rep_bias="log_size")
    anchored = AnchoredDGA(window=WINDOW, summary="streaming", rep_bias="log_size")
    complementary = {
        "prompt": dga(selection="prompt", min_focal=0),
        "prompt, not complementary": dga(selection="prompt", min_focal=0, complementary=False),
    }
    runs = [
        adapted("llama", "dense", Dense(), seed, more={"lca": lca(), "dga": dga(), "window": SAME_CACHE}, noise=True),
        adapted("llama", "cca", CCA(window=WINDOW), seed),
        adapted("llama", "lca", lca(), seed, noise=True),
        adapted("llama", "dga", dga(), seed, more=complementary, noise=True),
        adapted("llama", "dga-streaming-bias", focal, seed),
        adapted("llama", "dga-random", dga(focal="random"), seed),
        adapted("llama", "dga-sparse", focal.replace(**SPARSE_DGA), seed),
        adapted("llama", "anchored-sparse", anchored.replace(**SPARSE_DGA), seed),
        adapted("llama", "lca-g=6", lca(group_size=6), seed),
        adapted("llama", "anchored", anchored, seed),
        adapted("llama", "bias=none", lca(rep_bias="none"), seed),
        adapted("llama", "cca-bias", CCA(window=WINDOW, rep_bias="log_size"), seed),
    ]
    if seed == 0:
        runs += [adapted("llama", "window", SAME_CACHE)]
        runs += [adapted("llama", f"dga-m={g}", dga(group_size=g)) for g in (4, 8, 32, 64)]
        runs += [adapted("llama", f"dga-gamma={gamma}", dga(gamma=gamma)) for gamma in (0.3, 0.5, 0.7, 0.9)]
        runs += [
            adapted("llama", label.replace(", ", "-").replace(" ", "-"), method.replace(allow_future=True))
            for label, method in complementary.items()
        ]
    return runs


def scratch_runs(seed: int) -> list[Run]:
    """Convergence from random weights beside dense attention."""
    exact = DGA(window=1)
    ahead = DGA(selection="prompt", min_focal=0, window=1, allow_future=True)
    runs = [
        from_scratch("gpt2", label, method, seed)
        for label, method in (("dense", Dense()), ("dga", exact), ("dga-prompt", ahead))
    ]
    if seed == 0:
        runs += [
            from_scratch("opt", label, method, seed)
            for label, method in (("dense", Dense()), ("dga", exact), ("dga-prompt", ahead))
        ]
    runs += [
        from_scratch(architecture, label, method, seed)
        for architecture in ("mla", "llama")
        for label, method in (("dense", Dense()), ("lca", lca()))
    ]
    return runs


def all_runs() -> list[Run]:
    """In the order in which they are wanted: bases, one seed of everything, then the other seeds."""
    runs = [base_run(architecture, seed) for seed in SEEDS for architecture in ("mla", "llama")]
    runs += scratch_runs(0)
    first, second, third = ([*mla_runs(seed), *llama_runs(seed), *short_mla_runs(seed)] for seed in SEEDS)
    decisive = {run.name[:-1] for run in (*second, *third)}
    runs += [run for run in first if run.name[:-1] in decisive]
    runs += second
    runs += [run for run in first if run.name[:-1] not in decisive]
    runs += third
    runs += [run for seed in SEEDS[1:] for run in scratch_runs(seed)]
    return runs
