"""On a CUDA device (collected only there): plain generate replays a graph and gives the growing cache's tokens."""

import pytest
import torch
from gpu.running import SELECT, agree, condensed, generate, padded
from gpu.test_graph import METHODS, MIXED
from models import tiny

import condense

STEPS = 100
CHOICES = METHODS | {"selection": SELECT, "recall": condense.Recall(group_size=16, window=64, num_recall=2)}
# latents cannot be read as one prompt with a selection of its tokens
CELLS = (
    MIXED
    | {f"llama-{name}": ("llama", method) for name, method in CHOICES.items()}
    | {f"deepseek_v3-{name}": ("deepseek_v3", method) for name, method in CHOICES.items() if method is not SELECT}
)


@pytest.mark.parametrize(("name", "method"), CELLS.values(), ids=CELLS)
def test_tokens_are_those_of_the_growing_cache(graphs, name, method):
    model, (ids, mask) = condensed(method, name), padded()
    want = generate(model, ids, mask, STEPS, cache_implementation="dynamic")
    assert not graphs
    for times in (1, 2):
        got = generate(model, ids, mask, STEPS)
        if method is SELECT:  # steps cannot be read again as one prompt to look up a near tie
            assert torch.equal(got[:, : ids.shape[1] + 20], want[:, : ids.shape[1] + 20])
        else:
            agree(got, want, model, mask)
        assert len(graphs) == times


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_shares_of_closed_groups_are_those_of_a_cpu_and_captured_steps_are_refused(family):
    noted = []
    for device in ("cpu", "cuda"):
        model = condense.apply(tiny.model(family).to(device, torch.float32), tiny.RECALL)
        with condense.closed_mass(model) as shares:
            tiny.generate(model, tiny.ROWS[0][None].to(device))
        noted.append(torch.stack([torch.stack(of_layer) for of_layer in shares.values()]))
    torch.testing.assert_close(*noted, rtol=0, atol=1e-3)
    ids = tiny.ROWS[0][None].cuda()
    cache = model(ids, use_cache=True).past_key_values
    with (
        torch.no_grad(), condense.closed_mass(model), pytest.raises(ValueError, match="got one captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):  # fmt: skip
        model(ids[:, :1], past_key_values=cache)
