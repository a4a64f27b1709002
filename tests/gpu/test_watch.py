"""On a CUDA device (collected only there): what `condense.closed_mass` says of steps by kernels."""

import pytest
import torch
from models import tiny

import condense


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_shares_are_those_of_a_cpu_and_captured_steps_are_refused(family):
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
