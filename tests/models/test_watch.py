"""What `condense.closed_mass` says of steps."""

import pytest
import torch
from models import tiny
from step_states import RECALLS, empty, own_by, step_settings, token_at

import condense
from condense.models.watch import unread_share
from condense.ops.recall.choice import choose_groups, index_scores, token_scores
from condense.ops.step import StepCall
from condense.ops.torch import step as torch_step


@pytest.mark.parametrize("name", ["two-open", "three-open", "g-1-opened", "window-0-opened", "a-third", "all-open"])
def test_it_is_the_share_of_the_weights_of_closed_groups(name):
    settings, generator = step_settings(RECALLS[name]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 40, 16, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    state, g, window = empty(settings, 40, 2, (16, 16)), settings.rule.chunk, settings.rule.window
    for t in range(40):
        torch_step.step(StepCall(token_at((q, k, v), t), state, settings, scale=0.4), own_by(settings))
        asked, closed = q[:, :, t : t + 1], max(0, t + 1 - window) // g
        scores, quota = index_scores(asked, state.group_index, 0.4), settings.choice.quota
        chosen = choose_groups(scores, torch.full((2, 1, 1), closed), quota, 2)[:, :, 0, :closed]
        far = token_scores(asked, state.group_index, 0.4)[:, :, 0, :closed].exp().sum(-1)
        near = (0.4 * asked @ k[:, :, closed * g : t + 1].repeat_interleave(2, 1).mT).exp().sum((2, 3))
        want = (far * ~chosen.repeat_interleave(2, 1)).sum(-1) / (far.sum(-1) + near)
        torch.testing.assert_close(unread_share(asked, state, settings, 0.4), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_every_step_is_noted_in_growing_and_static_caches(family):
    model, noted = condense.apply(tiny.model(family), tiny.RECALL), []
    for options in ({}, {"cache_implementation": "static"}):
        with condense.closed_mass(model) as shares:
            tiny.generate(model, tiny.ROWS[0][None], **options)
        tiny.generate(model, tiny.ROWS[0][None], **options)
        noted.append(torch.stack([torch.stack(shares[layer]) for layer in range(tiny.NUM_LAYERS)]))
    assert len(noted[0][0]) == tiny.NEW - 1
    torch.testing.assert_close(*noted, rtol=0, atol=1e-6)
    assert bool(((noted[0] >= 0) & (noted[0] < 1)).all())
    # the first layer opens all groups
    assert (noted[0] == 0).flatten(1).all(1).tolist() == [True, False, False]


def test_padding_has_no_share_and_open_groups_leave_nothing():
    model = condense.apply(tiny.model("llama"), tiny.RECALL.replace(num_recall=1.0))
    ids, mask = tiny.left_padded(tiny.ROWS)
    with torch.no_grad(), condense.closed_mass(model) as shares:
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        mask = torch.cat([mask, mask.new_tensor([[1], [0], [1]])], 1)
        model.model.layers[1].self_attn.compile(backend="eager")
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="watched already"), condense.closed_mass(model):
            pass
    for (share,) in shares.values():
        assert share.nan_to_num(-1.0).tolist() == [[0.0] * 4, [-1.0] * 4, [0.0] * 4]
    with pytest.raises(ValueError, match="must have layers with Recall"), condense.closed_mass(tiny.model("llama")):
        pass
