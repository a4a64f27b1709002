"""Models, prompts and comparisons that tests on a CUDA device share."""

import warnings
from contextlib import contextmanager

import torch
from models import tiny

import condense

METHODS = {
    "cca": condense.CCA(group_size=16, window=64),
    "lca": condense.LCA(group_size=16, window=64),
    "streaming": condense.CCA(group_size=16, window=64, summary="streaming", key_pooling="select", rep_bias="log_size"),
    "entries-4": condense.CCA(group_size=16, window=64, summary="streaming", rep_bias="log_size", entry_bits=4),
    "entries-8": condense.LCA(group_size=16, window=64, rep_bias="matched", entry_bits=8),
    "streaming-llm": condense.StreamingLLM(sink=4, window=60),
    "dga": condense.DGA(rep_bias="log_size"),
}
SELECT = condense.DGA(selection="prompt", min_focal=40, rep_bias="log_size")


def methods(*names):
    return {name: METHODS[name] for name in names}


@contextmanager
def no_waiting():
    """Raises if the host waits for the device. PyTorch warns that it does not notice every wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def condensed(choice, name="llama", dtype=torch.float32, **sizes):
    """Float32 with greedy choices far apart: equal tokens for many steps mean equal attention."""
    model = tiny.model(name, dtype, max_position_embeddings=1024, **sizes).to("cuda")
    return model if choice is None else condense.apply(model, choice)


def padded(*lengths):
    lengths = lengths or (150, 101)
    return [x.cuda() for x in tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in lengths])]


def generate(model, ids, mask, steps, **settings):
    torch.manual_seed(5)
    settings = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 1} | settings
    return model.generate(ids, attention_mask=mask, **settings)


def agree(got, want, model, mask):
    """Equal tokens; where they part, the growing cache must have seen a near tie there, of two logits computed twice.
    A sum of n numbers is off by at most n * eps / 2 of their size; in every layer the longest sum is over the tokens,
    and those over channels have room because roundings partly cancel.
    """
    parted = (got != want).any(0).nonzero()
    if parted.numel() == 0:
        return
    at = int(parted[0])
    with torch.no_grad():
        whole = torch.cat([mask, mask.new_ones(mask.shape[0], at - mask.shape[1])], dim=1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        logits = model(want[:, :at], attention_mask=whole, position_ids=positions, use_cache=False).logits[:, -1]
    rows = got[:, at] != want[:, at]
    gap = logits.gather(1, want[:, at, None]) - logits.gather(1, got[:, at, None])
    layers, eps = model.config.get_text_config().num_hidden_layers, torch.finfo(logits.dtype).eps
    near = 4 * layers * at * eps / 2 * float(logits.abs().max())
    assert float(gap[rows].abs().max()) < near, f"parted at {at - mask.shape[1]}"
