"""Scores choices by the tokens of an echoed prompt, or by the most likely tokens at each position of an answer."""

from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import Any, Final

from graftlm.errors import RequestFailedError, UnsupportedFeatureError
from graftlm.lang.backends.scoring import check_choices, first_difference
from graftlm.lang.choices import ChoiceScore

__all__ = ["MAX_PATH_TOKENS", "TokenNumbers", "echoed_scores", "path_scores"]

#: Maximum number of tokens of the model's answer with which choices are compared.
MAX_PATH_TOKENS: Final = 16


class TokenNumbers:
    """Assigns ids to tokens, because these endpoints only report texts. The ids are only valid for one `select`."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


def echoed_scores(
    prompt: str, choices: Sequence[str], echoes: Sequence[dict[str, Any] | None], numbers: TokenNumbers
) -> list[ChoiceScore] | None:
    """Return the scores of choices whose tokens the endpoint has echoed.

    Args:
        echoes: `logprobs` of the prompt, then of the prompt with each choice.

    Returns: the scores; None if the endpoint echoed something else.
    """
    texts = [prompt, *[prompt + choice for choice in choices]]
    rows = [_echoed(text, echo) for text, echo in zip(texts, echoes, strict=True)]
    if any(row is None for row in rows):
        return None
    before, *whole = [[numbers[text] for text, _ in row or ()] for row in rows]
    starts = [first_difference(before, tokens) for tokens in whole]
    check_choices(choices, [len(tokens) for tokens in whole], starts)
    return [
        ChoiceScore(tuple(tokens[start:]), tuple([logprob for _, logprob in (row or [])[start:]]))
        for tokens, row, start in zip(whole, rows[1:], starts, strict=True)
    ]


def _echoed(text: str, echo: dict[str, Any] | None) -> list[tuple[str, float]] | None:
    """Return the tokens of an echoed text with their log-probabilities, without generated tokens after it."""
    if not echo or not echo.get("tokens") or len(echo.get("text_offset") or ()) != len(echo["tokens"]):
        return None
    triples = zip(echo["tokens"], echo["token_logprobs"], echo["text_offset"], strict=True)
    row = [(token, 0.0 if logprob is None else float(logprob)) for token, logprob, at in triples if at < len(text)]
    length = sum(len(token) for token, _ in row)
    return row if row and length >= len(text) else None


def path_scores(
    choices: Sequence[str], tokens: Sequence[list[Any]], top: Sequence[list[list[Any]]], numbers: TokenNumbers
) -> list[ChoiceScore]:
    """Return the scores of the choices' first tokens, taken from the model's own answer at temperature 0.

    A choice is compared with the answer token by token. At the first difference, the choice gets the log-probability of
    the most likely reported token with which it can continue. No later token of the choice is scored.

    Args:
        tokens: [log-probability, None, text] for each token of the answer.
        top: for each token of the answer, the most likely tokens at its position, in the form of `tokens`.

    Raises:
        RequestFailedError: none of the reported tokens begins a choice.
        UnsupportedFeatureError: the best choices have equal scores.
    """
    scores = [_path_score(choice, tokens, top, numbers) for choice in choices]
    means = [fmean(score.logprobs) for score in scores]
    best = max(means)
    if best == -inf:
        answer = "".join(text for _, _, text in tokens)
        raise RequestFailedError(
            f"the model's answer {answer!r:.80} matches none of {list(choices)!r:.200}; ask for one of them in the "
            "prompt"
        )
    if means.count(best) > 1:
        equal = [choice for choice, mean in zip(choices, means, strict=True) if mean == best]
        raise UnsupportedFeatureError(
            f"the choices {equal!r:.200} have the same beginning, and this endpoint only reports the likelihood of "
            "the beginning; use choices that differ in their first letters"
        )
    return scores


def _path_score(
    choice: str, tokens: Sequence[list[Any]], top: Sequence[list[list[Any]]], numbers: TokenNumbers
) -> ChoiceScore:
    rest, ids, logprobs = choice, list[int](), list[float]()
    for (logprob, _, text), most_likely in zip(tokens, top, strict=True):
        if not rest:
            break
        own = [(logprob, text)] if _continues(text, rest) else []
        others = [(p, t) for p, _, t in most_likely if _continues(t, rest)]
        best = max(own or others, default=(-inf, ""))
        ids.append(numbers[best[1]])
        logprobs.append(float(best[0]))
        if not own:
            break
        rest = rest[len(text) :]
    return ChoiceScore(tuple(ids), tuple(logprobs)) if ids else ChoiceScore((numbers[""],), (-inf,))


def _continues(token: str, rest: str) -> bool:
    """Whether a token is a prefix of the rest of a choice, or the rest is a prefix of the token."""
    return bool(token) and (rest.startswith(token) or token.startswith(rest))
