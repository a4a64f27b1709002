"""Recall's kernels over a prompt against its definition.

A choice may differ where two groups' shares differ by less than the scores' own error. No test hides that: wherever the
kernels opened other groups, the shares are compared; and attention is compared over what the kernels opened, with the
weight that they gave to the other groups, which is compared on its own.
"""

import functools
import math
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from lanes import CUDA, DEVICE, DTYPES, check
from layers import Counting
from oracles import latent_oracle, oracle
from speed.budget import judge
from two_sources import ArrayChoice, others_are_near_ties

import condense
from condense.ops import RuleSpans, Source, UniformRule, attend_recall, recall
from condense.ops.backends import BACKENDS
from condense.ops.recall import IndexChoice, Quota, RecallSources, split_keys
from condense.ops.recall.rest import with_rest
from condense.ops.triton import attend_call, recall_attend, recall_choice, recall_score
from condense.ops.triton.attend_call import describe
from condense.ops.types import soft_cap

WIDTHS = [(D, D) for D in (64, 80, 96, 192, 256)] + [(192, 128)] if CUDA else [(40, 24)]
# d_n, d_r, d_c, d_v
LATENTS = [(128, 64, 512, 128), (64, 32, 256, 64), (64, 32, 160, 64)] if CUDA else [(16, 8, 256, 16)]
METHOD = condense.Recall(group_size=4, window=6, num_recall=3)


@dataclass(frozen=True)
class Case:
    """Queries from position ``start`` on over what a row has read; pads: left padding of each row, then start is 0.
    latent: width of one index and of queries that all heads choose by together; 0: each KV head by its own keys.
    """

    heads: tuple[int, int]
    g: int = 4
    L: int = 37
    start: int = 0
    window: int = 5
    r: int | Quota = 3
    pads: tuple[int, ...] = (0,)
    unchosen: str = "mean"
    widths: tuple[int, int] = (64, 64) if DEVICE == "cuda" else (16, 16)  # compiled kernels have widths of their own
    dtype: torch.dtype = torch.float32
    latent: int = 0


CASES = {
    "ratio-1": Case((1, 1), L=45),
    "ratio-3-padded": Case((3, 1), L=29, pads=(0, 11)),
    "ratio-7": Case((7, 1), L=23, unchosen="drop"),
    "later-queries": Case((2, 1), 3, L=9, start=40, window=3),
    "a-fifth-padded": Case((3, 1), r=Quota(least=2, part=1, of=5), pads=(0, 13)),
    "stretches": Case((3, 1), 1, L=20, start=540, pads=(0, 300, 550)),
    "no-window": Case((2, 2), 1, L=13, window=0, r=2),
    "all-groups-of-whole-tiles": Case((2, 1), 1, L=1, start=127, window=0),
    "latents-padded": Case((3, 3), L=29, pads=(0, 11), latent=288),
    "latents-later": Case((2, 2), L=33, start=40, latent=288, unchosen="drop"),
    "one-index-for-two-heads": Case((4, 2), L=37, pads=(0, 6), latent=64),
}
if CUDA:
    CASES |= {
        f"{dtype}-{name}".removeprefix("torch."): Case(*fields, widths=(128, 128), dtype=dtype)
        for dtype in DTYPES
        for name, fields in {
            "ratio-1": ((2, 2), 16, 1100, 0, 100, 9),
            "ratio-4": ((8, 2), 16, 1500, 0, 100, 20, (0, 301)),
            "a-twelfth": ((4, 1), 16, 1300, 0, 100, Quota(part=1, of=12), (0, 77)),
            # ranked in rows of 32 and 64 groups, whose lanes were once mixed up
            "32-groups-of-32": ((4, 1), 32, 16, 1024, 0, Quota(part=1, of=4), (0,), "drop"),
            "32-groups-of-16": ((4, 1), 16, 16, 512, 0, Quota(part=1, of=4), (0,), "drop"),
            "ratio-7-groups-of-32": ((7, 1), 32, 901, 0, 64, 12, (0,), "drop"),
            "later-queries": ((4, 1), 16, 333, 2048, 64, 30),
        }.items()
    }
    CASES |= {
        f"{dtype}-latents-{name}".removeprefix("torch."): Case(*fields, dtype=dtype, latent=latent)
        for dtype in DTYPES
        for name, (latent, *fields) in {
            "deepseek": (576, (16, 16), 16, 1300, 0, 100, 20, (0, 301), "mean", (192, 128)),
            "many-heads": (576, (64, 64), 16, 400, 500, 64, 9, (0,), "mean", (192, 128)),
            "minicpm": (288, (40, 40), 16, 333, 1024, 64, 9, (0,), "mean", (96, 64)),
            "groups-of-32": (576, (5, 5), 32, 901, 0, 64, 9, (0,), "drop", (192, 128)),
        }.items()
        if dtype == DTYPES[0] or name != "many-heads"  # 64 heads in float32 take four minutes to compile
    }


@pytest.fixture(autouse=True)
def poisoned_scratch(poison):
    poison(recall_choice, "_scratch")


def results_of(name, monkeypatch):
    results, original = [], getattr(recall_attend, name)
    monkeypatch.setattr(recall_attend, name, lambda *a: results.insert(0, original(*a)) or results[0])
    return results


@pytest.fixture
def chosen(monkeypatch):
    return results_of("choose", monkeypatch)


@pytest.fixture
def weighed(monkeypatch):
    return results_of("rest_weights", monkeypatch)


class Problem:
    """Queries, sources, spans and index of a case; its means are any numbers, so that no test depends on them."""

    def __init__(self, case, seed=0):
        (H, K), (D, Dv), g, rows = case.heads, case.widths, case.g, len(case.pads)
        generator, tokens = torch.Generator().manual_seed(seed), case.start + case.L
        first, G = max(0, case.start + 1 - case.window) // g * g, tokens // g

        def random(*shape):
            return torch.randn(rows, *shape, generator=generator).to(DEVICE, case.dtype)

        self.case, self.quota = case, case.r if isinstance(case.r, Quota) else Quota(case.r)
        starts = torch.tensor([case.start - pad for pad in case.pads])
        self.first = (starts + 1).clamp(min=0) // g
        stored = [random(K, n, width) for n in (G * g, tokens - first) for width in (D, Dv)]
        self.inputs = [random(H, case.L, D), *stored]
        if case.unchosen == "mean":
            self.inputs.append(random(K, G + 1 - int(self.first.min()), Dv).float())
        windows = torch.tensor([first - pad for pad in case.pads])
        self.spans = RuleSpans(UniformRule(g, case.window), starts, windows)
        self.asked, keys = self.inputs[0], self.inputs[1]
        if case.latent:
            self.asked, keys = random(H, case.L, case.latent), random(1, G * g, case.latent)
        self.index = split_keys(keys.unflatten(2, (G, g)))[0]
        self.closed = self.spans.at(0, case.L, torch.device(DEVICE))[0].hi
        self.scale = D**-0.5

    def choice(self):
        return IndexChoice(self.asked, self.index, self.scale, self.quota)

    def arguments(self):
        starts, rule = describe(self.spans, 2, self.case.L, torch.device(DEVICE))
        return self.asked, *self.index, starts, rule, self.scale, list(self.quota), int(self.closed.max())

    def rest_arguments(self, softcap):
        asked, signs, steps, starts, rule, scale, _, closed = self.arguments()
        groups = recall_choice.choose(*self.arguments())
        return asked, signs, steps, [groups], starts, rule, [scale, softcap], [closed, 5]

    def attend(self, inputs, choice, backend, weight=None, **kwargs):
        """Output and log-sum-exp, 0 for queries that see nothing. weight: of what they do not open, if it is given."""
        sources = RecallSources(Source(*inputs[1:3]), Source(*inputs[3:5]), self.spans)
        means = recall.GroupMeans(inputs[5], self.first) if len(inputs) > 5 else None
        of_choice = means if isinstance(choice, IndexChoice) else None
        settings = {"scale": self.scale, "means": of_choice, "backend": backend, "return_lse": True}
        out, lse = attend_recall(inputs[0], sources, choice, **settings, **kwargs)
        if weight is not None:
            seen = means.at(0, self.case.L, self.spans, self.case.g)
            out, lse = with_rest(out, lse, weight.to(lse.dtype), seen)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    def leaves(self, dtype=None):
        return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in self.inputs]

    def opened(self, groups):
        """Lists of groups ``[B, K, L, r]`` as a mask, checked to be in order and full."""
        G = self.index.steps.shape[2]
        real = groups < G
        assert torch.equal(real.sum(-1), self.quota.at(self.closed).expand(groups.shape[:3]))
        assert bool((groups.diff(dim=-1) > 0)[real[..., 1:]].all())
        mask = torch.zeros(*groups.shape[:3], G + 1, dtype=torch.bool, device=groups.device)
        return mask.scatter_(3, groups.long(), True)[..., :G]

    def check_choice(self, mask):
        of = self.asked.double(), self.index, self.scale
        others = others_are_near_ties(mask, self.closed, self.quota, *of)
        assert int(others.sum()) <= 0.02 * others.numel()


def compare(case, chosen, weighed, backend="triton"):
    problem = Problem(case)
    inputs, exact, plain = problem.leaves(), problem.leaves(torch.float64), problem.leaves()
    got = problem.attend(inputs, problem.choice(), backend)
    mask = problem.opened(chosen[0])
    problem.check_choice(mask)
    assert len(weighed) == (case.unchosen == "mean")
    want, yardstick = (problem.attend(x, ArrayChoice(mask), "torch", *weighed) for x in (exact, plain))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(DEVICE, case.dtype) for x in got]
    results = []
    for outputs, leaves in ((got, inputs), (want, exact), (yardstick, plain)):
        total = sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True))
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        results.append([outputs[0].detach(), *grads])
    verdict = judge(*results)
    assert verdict.passed, verdict
    size = problem.inputs[0].double().norm(dim=-1).amax() * problem.inputs[1].double().norm(dim=-1).amax()
    error = torch.finfo(case.dtype).eps * problem.scale * float(size)
    assert float((got[1] - want[1]).detach().abs().max()) <= error
    # without gradients a kernel adds what stands for the rest
    with torch.no_grad():
        verdict = judge(problem.attend(problem.inputs, problem.choice(), backend), want, yardstick)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", CASES)
def test_choice_output_and_gradients(name, chosen, weighed):
    compare(CASES[name], chosen, weighed)


SHARED = [name for name in CASES if not name.startswith(("torch.", "float", "bfloat"))]
SHARED += [f"bfloat16-{name}" for name in ("ratio-4", "a-twelfth", "later-queries", "latents-deepseek")] if CUDA else []


@pytest.mark.parametrize("own", [1, 5])
@pytest.mark.parametrize("name", SHARED)
def test_choices_for_others(name, own, monkeypatch):
    """Where the first of several queries chooses for them, kernels open what PyTorch opens; the last ``own`` choose,
    and of a least number open all.
    """
    monkeypatch.setattr(recall.choice, "OWN_CHOICES", own)
    problem = Problem(CASES[name])
    if len(CASES[name].pads) == 1:  # then tiles begin where those begin that share a choice
        start, window = (int(x) for x in (problem.spans.query_start, problem.spans.window_start))
        problem.spans = replace(problem.spans, query_start=start, window_start=window)
    sources = RecallSources(Source(*problem.inputs[1:3]), Source(*problem.inputs[3:5]), problem.spans)
    quota = problem.quota if isinstance(CASES[name].r, Quota) else Quota(least=CASES[name].r, part=1, of=99)
    choice = replace(problem.choice(), quota=quota, askers=recall.Askers.of_call(sources, CASES[name].L))
    exact = [x.double() for x in problem.inputs]
    got = problem.attend(problem.inputs, choice, "triton")
    want, plain = (problem.attend(x, choice, "torch") for x in (exact, problem.inputs))
    verdict = judge(got, want, plain)
    assert verdict.passed, verdict


def test_askers_that_a_row_does_not_need_see_closed_groups_alone():
    """The row that starts first has one more; the index has room for more groups than are closed."""
    start, window, index = torch.tensor([249, 250]), 3, split_keys(torch.randn(2, 1, 140, 2, 16, device=DEVICE))[0]
    q, rule, rows = torch.randn(2, 2, 10, 16, device=DEVICE), UniformRule(2, window), []
    for row in (slice(None), slice(0, 1), slice(1, 2)):
        spans = RuleSpans(rule, start[row], start[row] * 0)
        source = Source(q[row, :1], q[row, :1])
        askers = recall.Askers.of_call(RecallSources(source, source, spans), 10)
        choice = IndexChoice(q[row], recall.GroupIndex(*(x[row] for x in index)), 0.3, Quota(5), askers)
        rows.append(recall_attend._choose_shared(choice, spans, 128, recall_choice.choose))
    shared = [x.shape[2] - 10 for x in rows]
    assert shared[0] == shared[1] > shared[2]
    for row, alone in enumerate(rows[1:]):
        used = shared[1 + row]
        assert torch.equal(rows[0][row : row + 1, :, :used], alone[:, :, :used])
        assert torch.equal(rows[0][row : row + 1, :, -10:], alone[:, :, -10:])


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths(widths, chosen, weighed):
    compare(Case((2, 1), L=700 if CUDA else 21, widths=widths, dtype=DTYPES[0]), chosen, weighed)


@pytest.mark.parametrize(("L", "start", "r", "first", "last"), [(9, 140, 4, 20, 100), (5, 80, 5, 0, 83)])
def test_of_equal_scores_the_lower_groups_are_opened(chosen, L, start, r, first, last):
    """Ties of whole cells of groups, where there are more cells than groups to open, and where all are equal."""
    problem = Problem(Case((2, 1), 1, L=L, start=start, window=2, r=r))
    problem.inputs[1][:, :, first:last] = problem.inputs[1][:, :, first : first + 1].clone()
    problem.index = split_keys(problem.inputs[1].unflatten(2, (-1, 1)))[0]
    problem.attend(problem.inputs, problem.choice(), "triton")
    opened = problem.opened(chosen[0])
    problem.check_choice(opened)
    assert last < start or bool(opened[..., :r].all())


def test_blocks_of_queries_and_later_tokens_change_no_bit(chosen, monkeypatch):
    problem, words = Problem(Case((2, 1), L=200 if DEVICE == "cuda" else 25)), []  # tiles are larger on a GPU
    whole = problem.attend(problem.inputs, problem.choice(), "triton")
    limits = (recall_choice, "_SCRATCH"), (recall_attend, "_SCRATCH"), (attend_call, "_WORDS")
    for module, name in limits:
        monkeypatch.setattr(module, name, 1)

    def alone(make, *args):
        """What ``make`` returns, once no words of a block before are left."""
        assert all(word() is None for word in words)
        made = make(*args)
        words.append(weakref.ref(getattr(made, "words", made)))
        return made

    for module, name in ((attend_call, "opened"), (recall_attend, "marked")):
        monkeypatch.setattr(module, name, functools.partial(alone, getattr(module, name)))
    parts = problem.attend(problem.inputs, problem.choice(), "triton")
    assert len(words) > 4
    assert torch.equal(chosen[0], chosen[1])
    assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))
    method, n = METHOD.replace(num_recall=0.3, min_recall=1), 30
    inputs = [x.to(DEVICE) for x in oracle.random_qkv(1, 4, 2, 45, 64, 64, dtype=torch.float32)]
    others = [torch.cat([x[:, :, :n], -2 * x[:, :, n:]], 2) for x in inputs]
    one, other = (condense.attention(*qkv, method=method, backend="triton") for qkv in (inputs, others))
    assert torch.equal(one[:, :, :n], other[:, :, :n])
    assert not torch.equal(one[:, :, n:], other[:, :, n:])


@pytest.mark.parametrize(
    ("g", "D", "heads", "dtype"),
    [
        (1, 40, (3, 1), torch.float32), (3, 64, (2, 2), torch.bfloat16), (8, 80, (7, 1), torch.float16),
        (16, 128, (4, 2), torch.bfloat16), (24, 96, (1, 1), torch.float16), (64, 192, (5, 1), torch.float32),
        (128, 256, (2, 1), torch.bfloat16), (16, 576, (2, 2), torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_scores_are_the_definitions_to_the_bit(g, D, heads, dtype, monkeypatch):
    """For queries of whole numbers, whose rotated sums are exact in any order; over more groups than a tile has."""
    L, results, original = 2 * g + 9, [], recall_choice.score

    def keep(q, index, starts, scratch, sizes, *, scale):
        original(q, index, starts, scratch, sizes, scale=scale)
        results.append([x.clone() for x in scratch[:3]])

    monkeypatch.setattr(recall_choice, "score", keep)
    problem = Problem(Case(heads, g, L=L, start=max(6, 600 // g) * g, widths=(D, D), dtype=dtype))
    problem.asked = (problem.asked * 4).round()
    problem.check_choice(problem.opened(recall_choice.choose(*problem.arguments())))
    ((score, cell, lse),) = results
    # [B * K, cells, L * R, C] and [B * K, cells / 4, L * R, 4] to [B, H, L, ...]
    score, cell = (x.transpose(1, 2).flatten(2) for x in (score, cell))
    lse = lse.mT
    score, cell, lse = (x.unflatten(1, (L, -1)).transpose(1, 2).reshape(1, heads[0], L, -1) for x in (score, cell, lse))
    scale, G, C = problem.scale * math.log2(math.e), problem.index.signs.shape[2], recall_score.groups_per_cell(g)
    want = recall.index_scores(problem.asked, problem.index, scale)
    is_closed = (torch.arange(G, device=DEVICE) < problem.closed[..., None]).expand_as(want)
    assert torch.equal(score[..., :G][is_closed], want[is_closed])
    want = want.masked_fill(~is_closed, -math.inf)
    best = torch.nn.functional.pad(want, (0, -G % C), value=-math.inf).unflatten(3, (-1, C)).amax(4)
    some = best > -math.inf
    assert torch.equal(cell[..., : best.shape[3]][some], best[some])
    exact = (want.double() * math.log(2)).logsumexp(3) / math.log(2)
    # as large as a score that is rounded, and a sum of G rounded powers
    error = torch.finfo(torch.float32).eps * (4 * want[is_closed].abs().max() + G)
    lse = (lse.double() * math.log(2)).logsumexp(3) / math.log(2)
    assert float((lse - exact).abs().max()) <= float(error)


@pytest.mark.parametrize(
    ("g", "D", "heads", "r", "dtype", "softcap"),
    [
        (1, 40, (3, 1), 9, torch.float32, 0.0), (3, 64, (2, 2), 60, torch.bfloat16, 0.5),
        (8, 80, (7, 1), 1, torch.float16, 0.0), (16, 128, (1, 1), 2, torch.bfloat16, 0.0),
        (4, 288, (20, 1), Quota(least=3, part=1, of=2), torch.float32, 0.5),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_the_definitions(g, D, heads, r, dtype, softcap, monkeypatch):
    """For queries of whole numbers, as above; over more groups than a tile has, in scratch memory that holds NaN. Tiles
    are as large as on a GPU, so that words have up to 64 bits.
    """
    if not CUDA:
        monkeypatch.setattr(recall_attend, "_tile", lambda R, _, tile=recall_attend._tile: (tile(R, True)[0], {}))
    case = Case(heads, g, L=3 * g + 21, start=80 * g, r=r, pads=(0, 82 * g), widths=(D, D), dtype=dtype)
    problem = Problem(case)
    problem.asked = (problem.asked * 4).round()
    arguments = problem.rest_arguments(softcap)
    torch.use_deterministic_algorithms(True)
    try:
        got = recall_attend.rest_weights(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    numbers, unit = (x.double() for x in recall.rotated_queries(problem.asked))
    centres = problem.index.centres(D, torch.float64) * problem.index.steps[..., -1:].double()
    per_head = centres.repeat_interleave(heads[0] // heads[1], 1)
    scores, G = soft_cap(numbers @ per_head.mT * unit * problem.scale, softcap), centres.shape[2]
    is_rest = ~problem.opened(arguments[3][0]) & (torch.arange(G, device=DEVICE) < problem.closed[..., None])
    scores = scores.masked_fill(~is_rest.repeat_interleave(heads[0] // heads[1], 1), -math.inf)
    want = scores.logsumexp(-1) + math.log(g)
    assert torch.equal(got == -math.inf, want == -math.inf)
    some = want > -math.inf
    # of the largest score that is rounded, a sum of G rounded powers, and tanh
    error = torch.finfo(torch.float32).eps * (4 * scores[scores > -math.inf].abs().max() + G + 8 * softcap)
    assert float((got - want)[some].abs().max()) <= float(error)
    assert not bool(some.all())


def test_rotated_queries_take_of_the_scratch_memory(monkeypatch):
    """Few groups have few scores, and a block of queries then is as long as its rotated queries let it be."""
    problem, sizes, limit = Problem(Case((2, 2), L=300, window=270, latent=288)), [], 2**18
    rotated, score = recall_score.rotated, recall_choice.score

    def measured(*args):
        with Counting() as counting:
            results = rotated(*args)
        sizes[-1] += counting.most_bytes
        return results

    def counted(q, index, starts, scratch, *args, **kwargs):
        sizes.append(scratch.score.nbytes)
        score(q, index, starts, scratch, *args, **kwargs)

    recall.rotation(288, torch.device(DEVICE))
    # the interpreter makes tensors of its own
    monkeypatch.setattr(recall_score, "_ROTATE", lambda _, tensors, *rest: [x.zero_() for x in tensors[2:]])
    monkeypatch.setattr(recall_score, "rotated", measured)
    monkeypatch.setattr(recall_choice, "score", counted)
    monkeypatch.setattr(recall_choice, "_SCRATCH", limit)
    recall_choice.choose(*problem.arguments())
    assert len(sizes) > 1
    assert limit / 2 < max(sizes) <= limit


@pytest.mark.parametrize(("window", "r", "unchosen"), [(5, 100, "mean"), (5, 100, "drop"), (30, 3, "mean")])
def test_every_group_and_a_prompt_in_which_nothing_closes(window, r, unchosen):
    problem = Problem(Case((2, 1), L=21, window=window, r=r, unchosen=unchosen))
    got, want = (problem.attend(problem.inputs, problem.choice(), x) for x in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_twice_gives_the_same_bits():
    problem = Problem(Case((2, 1), L=600 if CUDA else 29))
    results = []
    for _ in range(2):
        inputs = problem.leaves()
        out, lse = problem.attend(inputs, problem.choice(), "triton")
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def compare_as_one_graph(case, backend):
    """The choice is traced as one operation, and no bit of outputs and gradients changes."""
    problem, nodes = Problem(case), []

    def attend(*inputs):
        return problem.attend(inputs, problem.choice(), backend)

    def keep(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=keep)):
        inputs = problem.leaves()
        out, lse = function(*inputs)
        results.append([out, lse, *torch.autograd.grad(out.square().sum(), inputs)])
    for name, count in (("choose_recall", 1), ("weigh_recall", case.unchosen == "mean")):
        assert sum(name in node for node in nodes) == count
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["ratio-1", "ratio-7"])
def test_compiled_as_one_graph(name):
    compare_as_one_graph(CASES[name], "triton")


def test_choice_and_weights_are_whole_operations():
    problem = Problem(CASES["a-fifth-padded"])
    torch.library.opcheck(recall_choice.choice_operation, problem.arguments())
    torch.library.opcheck(recall_attend.rest_operation, problem.rest_arguments(0.0))


@pytest.mark.parametrize("widths", LATENTS, ids=str)
@pytest.mark.parametrize("method", [METHOD, METHOD.replace(unchosen="drop", window=0)], ids=["mean", "drop"])
def test_a_prompt_of_latents_is_what_the_definition_says(method, widths, chosen):
    L, padding = 31, torch.tensor([0, 9])
    weights = torch.randn(2, 3, L, widths[3], generator=torch.Generator().manual_seed(1))

    def call(backend, *inputs):
        return [condense.latent_attention(*inputs, method=method, backend=backend, padding=padding)]

    check(call, latent_oracle.random(2, 3, L, widths, torch.float32), [weights])
    assert len(chosen) == 1
    assert chosen[0].shape[1] == 1


def test_auto_takes_the_kernels_where_they_run(monkeypatch):
    taken, operations = [], BACKENDS["triton"].load()
    counted = operations._replace(attend_recall=lambda *a, **kw: taken.append(a) or operations.attend_recall(*a, **kw))
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], imports=lambda: counted, _loaded=[]))
    inputs = [x.to(DEVICE) for x in latent_oracle.random(1, 2, 40, LATENTS[0], torch.float32)]
    auto, _ = (condense.latent_attention(*inputs, method=METHOD, backend=name) for name in ("auto", "triton"))
    assert len(taken) == (2 if CUDA else 1)
    assert bool(auto.isfinite().all())
