"""The sources of Recall's attention, and the closed groups that a query opens: by the index, the best per KV head.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, G groups of g tokens, N window tokens, D and Dv widths.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condense.ops.latents import Ranks
from condense.ops.recall.index import GroupIndex, rotated_queries
from condense.ops.spans import RuleSpans, Source, UniformRule
from condense.ops.tensors.per_row import IntT, as_rows, at_least, at_most, max_row

# more groups than any row has
_UNLIMITED = 2**31 - 1
# largest denominator of a share of the groups, so that a number of groups times its numerator fits into int64
_MAX_DENOMINATOR = 2**31 - 1


class RecallSources(NamedTuple):
    """The sources that queries attend to, all in one dtype; keys and values must be finite, seen or not.

    store: k ``[B, K, G * g, D]``, v ``[B, K, G * g, Dv]``, the exact tokens: those of group j stand in columns
    ``[j * g, (j + 1) * g)``, groups counted from a row's first real token. window: k ``[B, K, N, D]``, v
    ``[B, K, N, Dv]``. spans: of groups (``[0, closed groups)``) and window, of a
    `condense.ops.spans.UniformRule`; queries at padding see nothing.
    """

    store: Source
    window: Source
    spans: RuleSpans

    @property
    def group_size(self) -> int:
        """Tokens per group, g."""
        assert isinstance(self.spans.rule, UniformRule)
        return self.spans.rule.chunk

    @property
    def num_groups(self) -> int:
        """Groups in the store, G."""
        return self.store.k.shape[2] // self.group_size


class Quota(NamedTuple):
    """The number of closed groups that a query opens: ``ceil(closed * part / of)``, from ``least`` to ``most``."""

    most: int = _UNLIMITED
    least: int = 0
    part: int = 1
    of: int = 1

    @classmethod
    def of_share(cls, share: float, least: int = 0) -> Self:
        """The quota for a share above 0 and at most 1, in exact arithmetic: 0.55 of 100 is 55, not 56.

        The share becomes the nearest fraction whose denominator fits into 31 bits: 0.3333333333333333 is a third.
        """
        nearest = Fraction(str(share)).limit_denominator(_MAX_DENOMINATOR)
        part, of = max(nearest, Fraction(1, _MAX_DENOMINATOR)).as_integer_ratio()
        return cls(least=least, part=part, of=of)

    @property
    def shared(self) -> Self:
        """The quota of a query that chooses for others too: half of ``least``, rounded up.

        Prompts lose as little by it, and take less time: `docs/recall.md`.
        """
        return self._replace(least=(self.least + 1) // 2)

    def at(self, closed: IntT) -> IntT:
        """Groups to open of ``closed`` groups, an int or int64 of any shape."""
        share = (closed * self.part + (self.of - 1)) // self.of
        # ``least`` or more, but no more than are closed, which the share never exceeds
        return at_most(share + at_least(at_most(closed, self.least) - share, 0), self.most)


# number of last queries of a call that choose for themselves: a question, and the token that begins its answer
OWN_CHOICES = 64
# groups that close between two queries that choose for others; 2 at most, so that a query opens at most one group more
# than were chosen for it
SHARED = 2


class Askers(NamedTuple):
    """The askers of a call, which are the queries that choose groups, and the asker whose groups each query opens.

    columns int64 ``[B|1, A]``: the A askers, of which the first ``num_shared`` choose for others too. queries int32
    ``[3, B|1, L]``, for each query: the number of its asker; the column of the next query with another asker; a group
    that the query opens besides, because it was not closed for the asker, -1 for none. first_own: the column of the
    first query that chooses for itself alone. lead: queries before the first asker that chooses for ``SHARED * g`` of
    them, if that is the same in all rows, else 0.
    """

    columns: Tensor
    queries: Tensor
    num_shared: int
    first_own: int
    lead: int

    @classmethod
    def of_call(cls, sources: RecallSources, L: int) -> Self:
        """Askers of L queries: the query at which every `SHARED`-th group closes asks for itself and all up to the next
        such query. The last `OWN_CHOICES` queries ask for themselves.
        """
        spans, device = sources.spans, sources.window.k.device
        return spans.once(("askers", L, device), lambda: cls._of_spans(spans, L, device))

    @classmethod
    def _of_spans(cls, spans: RuleSpans, L: int, device: torch.device) -> Self:
        rule, num_own = spans.rule, min(OWN_CHOICES, L)
        assert isinstance(rule, UniformRule)
        assert rule.window is not None
        n = SHARED * rule.chunk
        ahead = spans.query_start + (1 - rule.window)
        num_shared = max_row((ahead + (L - 1)) // n - ahead // n) + 1
        lead = 0 if isinstance(ahead, Tensor) else -ahead % n
        ahead, padding = as_rows(ahead, 1)[:, None], as_rows(spans.padding, 1)[:, None]
        column = torch.arange(L, device="cpu")[None]
        block, is_own = ahead // n, column >= L - num_own
        number, closed = (ahead + column) // n - block, (ahead + column) // rule.chunk
        first = torch.maximum((block + torch.arange(num_shared, device="cpu")) * n - ahead, padding).clamp(max=L - 1)
        columns = torch.cat([first, column[:, L - num_own :].expand(len(first), -1)], dim=1)
        of = torch.where(is_own, num_shared + column - (L - num_own), number)
        until = torch.where(is_own, column + 1, ((block + number + 1) * n - ahead).clamp(max=L - num_own))
        is_newer = (closed > (block + number) * SHARED) & (closed > 0) & (column >= padding) & ~is_own
        queries = torch.stack(torch.broadcast_tensors(of, until, torch.where(is_newer, closed - 1, -1)))
        return cls(columns.to(device), queries.int().to(device), num_shared, L - num_own, lead)


@dataclass(frozen=True)
class IndexChoice:
    """The groups with the highest index scores for each query, as many as ``quota`` says.

    q ``[B, H, L, D]``: queries as wide as the keys of the index (for latents, absorbed ones). scale: attention's, > 0.
    askers: the queries that choose, by ``quota.shared`` if for others too; None: each for itself. ranks: the processes
    whose heads choose together; None for a single process.
    """

    q: Tensor
    index: GroupIndex
    scale: float
    quota: Quota
    askers: Askers | None = None
    ranks: Ranks | None = None

    def opens_all(self, closed: int) -> bool:
        """True if every query opens all groups that are closed for it, of which there are at most ``closed``."""
        is_shared = self.askers is not None and self.askers.first_own > 0
        # a share that rounds up to all of `closed` groups does so for every smaller number too
        return (self.quota.shared if is_shared else self.quota).at(closed) == closed

    def at(self, start: int, stop: int, closed: Tensor, num_groups: int) -> Tensor:
        """Groups that queries ``[start, stop)`` open, bool ``[B, K|1, stop - start, num_groups]``.

        closed int64 ``[B|1, 1, stop - start]``: the closed groups of each query, which alone may be open.
        """
        index, split = self.index.narrow(0, num_groups), start
        chosen = []
        if self.askers is not None:
            split = min(max(self.askers.first_own, start), stop)
            if split > start:
                chosen.append(self._of_others(index, start, split, closed[..., : split - start]))
        if split < stop:
            scores = index_scores(self.q[:, :, split:stop], index, self.scale)
            chosen.append(self._choose(scores, closed[..., split - start :], self.quota))
        return torch.cat(chosen, dim=2)

    def _of_others(self, index: GroupIndex, start: int, stop: int, closed: Tensor) -> Tensor:
        """Groups, as `at`, of queries that open what an asker chose for them; each asker is asked once."""
        assert self.askers is not None
        number, _, newer = self.askers.queries[:, :, start:stop].long()
        # number of askers, one more than fits evenly, as a row may begin in the middle of an asker's queries
        place, most = number - number[:, :1], (stop - start - 1) // (SHARED * index.group_size) + 2
        first = (number[:, :1] + torch.arange(most, device=number.device)).clamp(max=self.askers.num_shared - 1)
        q = self.q.take_along_dim(self.askers.columns.take_along_dim(first, 1)[:, None, :, None], 2)
        # groups closed for each asker, the same for all its queries; the largest, because padding counts as 0
        closed = closed[:, 0] - (newer >= 0).long()
        closed = closed.new_zeros(len(closed), most).scatter_reduce(1, place.expand(closed.shape), closed, "amax")
        chosen = self._choose(index_scores(q, index, self.scale), closed[:, None], self.quota.shared)
        chosen = chosen.take_along_dim(place[:, None, :, None], 2)
        return chosen | (torch.arange(chosen.shape[3], device=q.device) == newer[:, None, :, None])

    def _choose(self, scores: Tensor, closed: Tensor, quota: Quota) -> Tensor:
        return choose_groups(scores, closed, quota, self.index.signs.shape[1], self.ranks)


@torch.no_grad()
def index_scores(q: Tensor, index: GroupIndex, scale: float) -> Tensor:
    """Score of each group for each query, estimated from the index, ``[B, H, L, G]`` float32 or wider, no gradient.

    q ``[B, H, L, D]``, scale > 0. A group's score is its centre's plus the largest difference of a token from it.
    """
    of_tokens, of_centres, unit = _products(q, index)
    return (of_tokens.amax(-1) + of_centres) * (unit * scale)


@torch.no_grad()
def centre_scores(q: Tensor, index: GroupIndex, scale: float) -> Tensor:
    """Score of the centre of each group for each query, a part of `index_scores`, of the same shape and dtype."""
    (B, H, L, D), (_, K, G, _), (numbers, unit) = q.shape, index.steps.shape, rotated_queries(q)
    return _of_centres(numbers.reshape(B, K, -1, D), index).reshape(B, H, L, G) * (unit * scale)


@torch.no_grad()
def token_scores(q: Tensor, index: GroupIndex, scale: float) -> Tensor:
    """Score of each token of each group, ``[B, H, L, G, g]``; the largest of a group is its `index_scores`."""
    of_tokens, of_centres, unit = _products(q, index)
    return (of_tokens + of_centres[..., None]) * (unit * scale)[..., None]


def _products(q: Tensor, index: GroupIndex) -> tuple[Tensor, Tensor, Tensor]:
    """Products of queries in whole numbers with tokens' differences from their centres ``[B, H, L, G, g]`` and with
    centres ``[B, H, L, G]``, and the value of 1 in these numbers ``[B, H, L, 1]``.
    """
    B, H, L, D = q.shape
    (_, K, G, _), g, (numbers, unit) = index.steps.shape, index.group_size, rotated_queries(q)
    signs, steps = index.token_signs(D, numbers.dtype).flatten(2, 3), index.steps.to(numbers.dtype)[:, :, None, :, :g]
    # whole numbers below 2 ** 24, so that no order of the sum rounds them
    numbers = numbers.reshape(B, K, H // K * L, D)
    of_tokens = (numbers @ signs.mT).unflatten(3, (G, g)) * steps
    return of_tokens.reshape(B, H, L, G, g), _of_centres(numbers, index).reshape(B, H, L, G), unit


def _of_centres(numbers: Tensor, index: GroupIndex) -> Tensor:
    """Products ``[B, K, n, G]`` of queries in whole numbers ``[B, K, n, D]`` with centres."""
    centres = index.centres(numbers.shape[3], numbers.dtype)
    return (numbers @ centres.mT) * index.steps[:, :, None, :, -1].to(numbers.dtype)


@torch.no_grad()
def choose_groups(scores: Tensor, closed: Tensor, quota: Quota, K: int, ranks: Ranks | None = None) -> Tensor:
    """The closed groups with the best scores per KV head, as many as ``quota`` says, bool ``[B, K, L, G]``.

    scores ``[B, H, L, G]``, finite where closed; closed int64 ``[B|1, 1, L]``: query t may open groups
    ``[0, closed(t))``. A KV head's score is the largest of its R query heads' softmax over the closed groups, compared
    in log space. Ties, scores the same to the bit, go to the lower group. ranks: the processes that have more of its
    query heads, which all choose the same.
    """
    G = scores.shape[-1]
    is_closed = torch.arange(G, device=scores.device) < closed[..., None]
    never = float("-inf")
    scores = scores.masked_fill(~is_closed, never)
    shares = (scores - scores.logsumexp(-1, keepdim=True)).unflatten(1, (K, -1)).amax(2).masked_fill(~is_closed, never)
    if ranks is not None:
        shares = ranks.max(shares)
    most = quota.at(G)
    if most == 0:
        return torch.zeros_like(shares, dtype=torch.bool)
    wanted = quota.at(closed)[..., None]
    place = (wanted - 1).clamp(min=0).expand(*shares.shape[:3], 1)
    last = shares.topk(most, dim=-1, sorted=True).values.gather(-1, place)
    better, equal = shares > last, shares == last
    room = wanted - better.sum(-1, keepdim=True)
    return (better | (equal & (equal.cumsum(-1) <= room))) & is_closed


def chosen_groups(chosen: Tensor, most: int) -> Tensor:
    """The numbers of the open groups, ascending, int64 ``[..., most]``; filled up with G if fewer are open.

    chosen bool ``[..., G]``, at most ``most`` of them True, most <= G.
    """
    G = chosen.shape[-1]
    group = torch.where(chosen, torch.arange(G, device=chosen.device), G)
    return group.topk(most, dim=-1, largest=False, sorted=True).values
