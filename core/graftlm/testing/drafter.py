"""The conformance kit of drafters, and drafters that follow a script."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from graftlm.contracts import Draft, Drafter, DrafterContext, DraftHead, DraftHeadContext, DraftRequest, PrefixKey
from graftlm.speculation.draft_budget import DraftBudget
from graftlm.speculation.step_costs import StepCosts
from graftlm.testing.cache_rig import CacheRig
from graftlm.testing.conformance import Conformance
from graftlm.testing.fake_draft_model import FakeDraftHeads, FakeDraftModel
from graftlm.testing.naive_cache import NaiveCache
from graftlm.types import TokenIds

__all__ = ["SCRIPTS", "AllDrafts", "DrafterConformance", "ScriptedDrafter"]

_VOCAB_SIZE: Final = 40
_LIMIT: Final = 6

#: Names of a `ScriptedDrafter`'s behaviours.
SCRIPTS: Final = (
    "right",
    "wrong",
    "random",
    "partly",
    "too_long",
    "none",
    "raises",
    "not_drafts",
    "outside",
    "too_few",
)


class AllDrafts(DraftBudget):
    """A draft budget that verifies all drafted tokens, independent of the expected gain."""

    def __init__(self, max_drafts: int = 8) -> None:
        super().__init__(StepCosts(), max_drafts)

    def lengths(self, num_rows: int, probabilities: Sequence[float], limits: Sequence[int]) -> list[int]:
        """Return the full length of each draft."""
        return list(limits)

    def may_pay(self, num_rows: int) -> bool:
        """Return True."""
        return True


class ScriptedDrafter(Drafter):
    """A drafter that knows the tokens to be sampled. Its scripts select right, wrong or invalid drafts.

    Args:
        oracle: function that returns the next n tokens of a request.
        scripts: names from `SCRIPTS`; each call uses a random one of them.
        vocab_size: V.
        seed: seed of the random numbers.

    Attributes:
        num_calls: number of calls of `propose`.
        closed: rows that were closed, in order.
    """

    def __init__(
        self,
        oracle: Callable[[DraftRequest, int], Sequence[int]],
        scripts: Sequence[str],
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self.num_calls = 0
        self.closed: list[int] = []
        self._oracle = oracle
        self._scripts = list(scripts)
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Return drafts by a random script; some scripts violate the contract, such as "raises" and "too_few"."""
        self.num_calls += 1
        script = self._random.choice(self._scripts)
        if script == "raises":
            raise RuntimeError("the script says so")
        if script == "not_drafts":
            return ["a draft"] * len(requests)  # type: ignore[list-item]
        if script == "too_few":
            return []
        return [self._draft(request, script) for request in requests]

    def close(self, row: int) -> None:
        """Record the closed row."""
        self.closed.append(row)

    def _draft(self, request: DraftRequest, script: str) -> Draft | None:
        if script == "none":
            return None
        num_tokens = request.limit + 7 if script == "too_long" else self._random.randint(1, request.limit)
        if script == "random":
            token_ids = [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]
        else:
            token_ids = list(self._oracle(request, num_tokens))
        if script == "wrong":
            token_ids = [(token_id + 1) % self._vocab_size for token_id in token_ids]
        elif script == "partly":
            token_ids[-1] = (token_ids[-1] + 1) % self._vocab_size
        elif script == "outside":
            token_ids[-1] = self._vocab_size + 3
        return Draft(np.array(token_ids, dtype=np.int32), self._random.random())


class DrafterConformance(Conformance, ABC):
    """The kit for the contract `Drafter`.

        class TestMyDrafter(DrafterConformance):
            def create(self, context):
                return MyDrafter(context)

    Attributes:
        parameters: `seed` is the seed of the random requests; `is_cleared` is whether a cache is cleared at once.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"seed": (0, 1, 2), "is_cleared": (False, True)}

    @abstractmethod
    def create(self, context: DrafterContext) -> Drafter:
        """Return a new drafter."""

    def test_there_is_one_entry_per_request(self, seed: int) -> None:
        """`propose` returns one entry per request, in their order; it also takes none, and any sequence."""
        drafter, requests = self.create(_context(_texts(seed))), _requests(seed)
        assert len(drafter.propose([])) == 0, "propose() returned drafts for no requests"
        together = drafter.propose(tuple(requests))
        assert len(together) == len(requests), (
            f"propose() returned {len(together)} entries for {len(requests)} requests"
        )
        assert all(draft is None or isinstance(draft, Draft) for draft in together)

    def test_drafts_are_within_their_limits(self, seed: int) -> None:
        """A draft has 1 to `limit` tokens, int32, from 0 to V - 1, and a confidence from 0 to 1."""
        requests = _requests(seed)
        for request, draft in zip(requests, self.create(_context(_texts(seed))).propose(requests), strict=True):
            if draft is None:
                continue
            assert draft.token_ids.dtype == np.int32, f"a draft is {draft.token_ids.dtype}, expected int32"
            assert draft.token_ids.ndim == 1
            assert 1 <= len(draft.token_ids) <= request.limit, f"{len(draft.token_ids)} tokens, limit {request.limit}"
            assert draft.token_ids.min() >= 0
            assert draft.token_ids.max() < _VOCAB_SIZE, "a draft has tokens outside the vocabulary"
            assert 0.0 <= draft.confidence <= 1.0

    def test_tokens_are_not_changed(self, seed: int) -> None:
        """`token_ids` are only read."""
        requests = _requests(seed)
        before = [request.token_ids.copy() for request in requests]
        self.create(_context(_texts(seed))).propose(requests)
        for request, tokens in zip(requests, before, strict=True):
            assert np.array_equal(request.token_ids, tokens), "propose() changed a request's tokens"

    def test_arrays_of_earlier_calls_are_not_used(self, seed: int) -> None:
        """`token_ids` are valid during the call only: the engine changes the array afterwards."""
        texts = _texts(seed)
        text = texts[""][0]
        lent, untouched = self.create(_context(texts)), self.create(_context(texts))
        for length in range(1, len(text) + 1, 3):
            token_ids = text[:length].copy()
            draft = _ids(lent.propose([DraftRequest(0, "", token_ids, _LIMIT)])[0])
            token_ids.fill(_VOCAB_SIZE - 1)
            expected = _ids(untouched.propose([DraftRequest(0, "", text[:length], _LIMIT)])[0])
            assert draft == expected, "a draft depends on an array of an earlier call"

    def test_other_namespaces_change_nothing(self, seed: int) -> None:
        """A draft depends on tokens of the request's own namespace only."""
        texts = _texts(seed)
        request = DraftRequest(0, "", texts[""][0][:12], _LIMIT)
        others = [DraftRequest(1 + i, "tenant", text[:12], _LIMIT) for i, text in enumerate(texts[""])]
        own = {"": texts[""]}
        alone = self._caching(own, own).propose([request])[0]
        among = self._caching({"": texts[""], "tenant": texts[""] + texts["tenant"]}, texts)
        among.propose(others)
        assert _ids(among.propose([request, *others])[0]) == _ids(alone), "another namespace's tokens changed a draft"

    def test_removed_texts_are_not_drafted(self, seed: int, is_cleared: bool) -> None:
        """After events have removed all texts from the cache, drafts are the same as with an empty cache."""
        drafter, rig = self._caching(_texts(seed), {}), _rig(_texts(seed))
        num_events = len(rig.events)
        if is_cleared:
            rig.cache.reset()
        else:
            while len(rig.cache.evict(1)):
                pass
        for event in rig.events[num_events:]:
            drafter.cache_event(event)
        requests = _requests(seed)
        expected = [_ids(draft) for draft in self.create(_context({})).propose(requests)]
        assert [_ids(draft) for draft in drafter.propose(requests)] == expected, "removed tokens were drafted"

    def test_a_closed_row_starts_anew(self, seed: int) -> None:
        """After `close`, a row may belong to another request; closing an unknown row does nothing."""
        texts = _texts(seed)
        first, second = (DraftRequest(0, "", text[:12], _LIMIT) for text in texts[""][:2])
        drafter = self.create(_context(texts))
        drafter.close(5)
        drafter.propose([first])
        drafter.close(0)
        expected = self.create(_context(texts)).propose([second])[0]
        assert _ids(drafter.propose([second])[0]) == _ids(expected), "a row's earlier request changed a draft"

    def _caching(
        self, stored: Mapping[str, Sequence[TokenIds]], continued: Mapping[str, Sequence[TokenIds]]
    ) -> Drafter:
        """Return a new drafter that has processed the events of a cache.

        Args:
            stored: namespace -> texts of the cache.
            continued: namespace -> texts that the drafter's context continues.
        """
        drafter = self.create(_context(continued))
        for event in _rig(stored).events:
            drafter.cache_event(event)
        return drafter


def _rig(texts: Mapping[str, Sequence[TokenIds]]) -> CacheRig:
    """Return a cache that contains some texts, and its events."""
    rig = CacheRig(NaiveCache, page_size=1)
    for namespace, group in texts.items():
        for text in group:
            rig.insert(PrefixKey(text, namespace))
    return rig


def _ids(draft: Draft | None) -> list[int] | None:
    return None if draft is None else draft.token_ids.tolist()


def _texts(seed: int) -> dict[str, list[TokenIds]]:
    """Return namespace -> cached token sequences, which contain repeated phrases."""
    draw = random.Random(seed)
    made: dict[str, list[TokenIds]] = {}
    for namespace in ("", "tenant"):
        phrases = [[draw.randrange(_VOCAB_SIZE) for _ in range(5)] for _ in range(3)]
        made[namespace] = [
            np.array([token for _ in range(8) for token in draw.choice(phrases)], dtype=np.int32) for _ in range(4)
        ]
    return made


def _requests(seed: int) -> list[DraftRequest]:
    draw = random.Random(seed)
    texts = [(namespace, text) for namespace, group in _texts(seed).items() for text in group]
    cut = [(namespace, text[: draw.randint(1, len(text))]) for namespace, text in texts]
    return [
        DraftRequest(row, namespace, text, draw.choice([1, 2, _LIMIT, 30])) for row, (namespace, text) in enumerate(cut)
    ]


def _context(texts: Mapping[str, Sequence[TokenIds]]) -> DrafterContext:
    """Return a context whose cache contains some token sequences, and whose draft models and heads are fakes."""

    def continuation(key: PrefixKey, num_tokens: int) -> TokenIds:
        length = len(key.token_ids)
        for text in texts.get(key.namespace, ()):
            if len(text) > length and np.array_equal(text[:length], key.token_ids):
                return text[length : length + num_tokens]
        return np.empty(0, dtype=np.int32)

    def load_model(path: str, kv_tokens: int) -> FakeDraftModel:
        return FakeDraftModel(_VOCAB_SIZE, -(-kv_tokens // 4), page_size=4)

    def load_head(make: Callable[[DraftHeadContext], DraftHead], path: str | None) -> FakeDraftHeads:
        return FakeDraftHeads(_VOCAB_SIZE)

    return DrafterContext(continuation, _VOCAB_SIZE, load_model, load_head)
