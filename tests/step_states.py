"""States and calls of decode steps: B rows, K KV heads, M entries of capacity, D and Dv widths."""

import dataclasses

import torch

import condense
from condense.methods import step_settings as step_settings
from condense.ops import NewToken
from condense.ops.step import StateSizes, StepCall, empty_state

_RECALL = condense.Recall(group_size=4, window=5, num_recall=2, min_recall=2)
RECALLS = {
    "two-open": _RECALL, "three-open": _RECALL.replace(window=9, num_recall=3), "g-6": _RECALL.replace(group_size=6),
    "window-0-opened": _RECALL.replace(window=0), "g-1-opened": _RECALL.replace(group_size=1, window=3, num_recall=5),
    "all-open": _RECALL.replace(num_recall=1.0),
    "a-third": _RECALL.replace(num_recall=1 / 3),
}  # fmt: skip
SELECT = condense.DGA(
    selection="prompt", group_size=4, gamma=0.5, min_focal=5, num_recent=3, num_random=4, rep_bias="log_size"
)


def empty(settings, length, K, widths, *, rows=2, dtype=torch.float64, spare=0, entries=None, device="cpu"):
    """Buffers for ``length`` tokens, or for ``entries`` entries; ``spare`` tokens can be taken back."""
    rule, Q = settings.rule, settings.num_summary + spare
    W = length if rule.window is None else min(length, rule.window + rule.chunk + spare)
    M, fine = rule.pooled(length, settings.summary_delay) * rule.entries if entries is None else entries, 0
    if (scales := settings.coarse_rule) is not None:
        M, fine = scales.made(length), scales.fine_slots(settings.summary_delay, spare)
    M = M if settings.choice is None else max(1, M)
    stored = 0 if settings.choice is None else M * rule.chunk
    sizes = StateSizes(rows, K, widths, M, W, Q, stored, sums=2 + -(-spare // rule.chunk), fine=fine)
    return empty_state(torch.empty(0, dtype=dtype, device=device), settings, sizes)


def with_store(settings, **changes):
    """The settings with another store; one with slots stays on the device, so that PyTorch can read it."""
    choice = dataclasses.replace(settings.choice, store=settings.choice.store._replace(**changes))
    return dataclasses.replace(settings, choice=choice)


def call_of(settings, state, token, **options):
    token = token if isinstance(token, NewToken) else NewToken(*token)
    return StepCall(token, state, settings, **options)


def own_by(settings):
    choice = settings.choice
    kept = {"unchosen": "mean" if choice.mean else "drop", "store_bits": choice.store.bits}
    sizes = {"group_size": settings.rule.chunk, "window": settings.rule.window}
    return condense.Recall(**kept, **sizes).represent


def token_at(qkv, t, real=None):
    return NewToken(*(x[:, :, t : t + 1] for x in qkv), None if real is None else real[:, t].to(qkv[0].device))


def given_away(held, groups):
    """Slots with their groups, in the order in which they are given away, once ``groups`` were open: hits move to the
    end in their old order, then those that come."""
    hits, others = ([pair for pair in held if (pair[1] in groups) is is_hit] for is_hit in (True, False))
    missing = [group for group in groups if group not in [known for _, known in held]]
    taken = [(slot, group) for (slot, _), group in zip(others, missing, strict=False)]
    return others[len(taken) :] + hits + taken


def check_slots(state, g):
    """Every slot holds the tokens of its group, no two the same group, and each slot stands once in the order."""
    parts = (x.flatten(0, 1) for x in (state.held, state.order, state.slots, state.store))
    for held, order, slots, store in zip(*parts, strict=True):
        assert order.sort().values.tolist() == list(range(len(order)))
        groups = held[held >= 0].tolist()
        assert len(set(groups)) == len(groups)
        for slot, group in enumerate(held.tolist()):
            if group >= 0:
                assert torch.equal(slots[slot * g : (slot + 1) * g], store[group * g : (group + 1) * g])
