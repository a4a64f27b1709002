"""`measure_recall` against dense weights token by token, and a cache of groups replayed by hand."""

import pytest
import torch
from analysis.test_deviation import ran
from analysis.test_patterns import watched
from analyze.recall import measure_recall
from models import tiny

import condense
from condense.methods import Recall

IDS = tiny.tokens(1, 90)[0]
STEPS = 12
METHOD = condense.Recall(group_size=4, window=8, num_recall=3)
REFUSED = {
    "method": ("llama", condense.CCA(), 90, "condense.Recall"),
    "short": ("llama", METHOD, 20, "closes a group before"),
    "long": ("llama", METHOD, 91, "at most that of the longest text"),
    "latents": ("deepseek_v3", METHOD, 90, "latents"),
}


def _watched(monkeypatch, model, method):
    """The report of `measure_recall`, and q, k and the open groups of every layer as attention itself had them."""
    seen, opened, attend = watched(monkeypatch), {}, Recall.attend

    def spy(self, q, context, *, scale, **kwargs):
        closed = context.spans.at(0, q.shape[2], q.device)[0].hi
        index = condense.ops.recall.GroupIndex(*context.extra[:2])
        choice = condense.ops.recall.IndexChoice(q, index, scale, self.quota)
        opened[len(opened)] = choice.at(0, q.shape[2], closed, index.signs.shape[2])[0]
        return attend(self, q, context, scale=scale, **kwargs)

    monkeypatch.setattr(Recall, "attend", spy)
    return measure_recall(model, method, [IDS], len(IDS), steps=STEPS, slots=(3, 5)), seen, opened


def test_shares_token_by_token(monkeypatch):
    model = tiny.model("llama")
    reports, seen, opened = _watched(monkeypatch, model, METHOD)
    assert [report.layer for report in reports] == list(range(tiny.NUM_LAYERS))
    for report in reports:
        q, k, scale = seen[report.layer]
        H, K, L = q.shape[1], k.shape[1], len(IDS)
        window, exact = torch.zeros(H), torch.zeros(H)
        for t in range(L - STEPS, L):
            closed = (t + 1 - 8) // 4
            for h in range(H):
                head = h // (H // K)
                weights = (scale * k[0, head, : t + 1] @ q[0, h, t]).softmax(0)
                window[h] += float(weights[closed * 4 :].sum()) / STEPS
                for j in opened[report.layer][head, t].nonzero()[:, 0].tolist():
                    exact[h] += float(weights[j * 4 : j * 4 + 4].sum()) / STEPS
        assert report.window == pytest.approx(float(window.mean()), abs=1e-6)
        assert report.opened == pytest.approx(float(exact.mean()), abs=1e-6)
        assert report.window + report.opened + report.pooled == pytest.approx(1)
        assert list(report.heads) == pytest.approx((window + exact).tolist(), abs=1e-6)
        assert report.best >= report.opened - 1e-9 or q.shape[1] > k.shape[1]


def test_hits_of_a_replayed_cache(monkeypatch):
    """With slots for one step's groups, a hit is a group that the step before opened."""
    reports, _, opened = _watched(monkeypatch, tiny.model("llama"), METHOD)
    for report in reports:
        rows = opened[report.layer][:, -STEPS:]
        again = (rows[:, 1:] & rows[:, :-1]).sum()
        assert report.hits[3] == pytest.approx(float(again / rows[:, 1:].sum()))
        assert report.hits[5] >= report.hits[3]


@pytest.mark.parametrize(("name", "method", "length", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(name, method, length, said):
    with pytest.raises(ValueError, match=said):
        measure_recall(tiny.model(name), method, [IDS], length, steps=STEPS)


def test_the_command(tmp_path):
    words = ["recall", "--length", "300", "--steps", "8", "--method", "recall:window=64,num_recall=4"]
    shown = ran(*words, "--json", str(tmp_path / "out.json"))
    assert "lowest head" in " ".join(shown.stdout.split())
    assert (tmp_path / "out.json").exists()
