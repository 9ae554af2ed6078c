"""Scoring choices by what such endpoints tell: the tokens of an echoed prompt, or the likeliest at each place."""

from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import Any, Final

from graftlm.errors import RequestFailedError, UnsupportedFeatureError
from graftlm.lang.backends.scoring import check_choices, first_difference
from graftlm.lang.choices import ChoiceScore

__all__ = ["MAX_PATH_TOKENS", "TokenNumbers", "echoed_scores", "path_scores"]

#: Tokens of the model's own answer along which choices are compared, at most.
MAX_PATH_TOKENS: Final = 16


class TokenNumbers:
    """Numbers for tokens, which these endpoints name by their text; of no meaning outside one `select`."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


def echoed_scores(
    prompt: str, choices: Sequence[str], echoes: Sequence[dict[str, Any] | None], numbers: TokenNumbers
) -> list[ChoiceScore] | None:
    """Return the scores of choices whose tokens were echoed, behind those of the prompt alone.

    Args:
        echoes: `logprobs` of the prompt, and of the prompt with each choice.

    Returns: None when the endpoint echoed something else.
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
    """Return the tokens of an echoed text with their log-probabilities, without those generated behind it."""
    if not echo or not echo.get("tokens") or len(echo.get("text_offset") or ()) != len(echo["tokens"]):
        return None
    triples = zip(echo["tokens"], echo["token_logprobs"], echo["text_offset"], strict=True)
    row = [(token, 0.0 if logprob is None else float(logprob)) for token, logprob, at in triples if at < len(text)]
    length = sum(len(token) for token, _ in row)
    return row if row and length >= len(text) else None


def path_scores(
    choices: Sequence[str], tokens: Sequence[list[Any]], top: Sequence[list[list[Any]]], numbers: TokenNumbers
) -> list[ChoiceScore]:
    """Return the scores of choices as far as they can be told from the model's own answer at temperature 0.

    A choice is followed along the answer's tokens; where it leaves them, the likeliest token there that leads on to it
    counts, and is the last that is known of it.

    Args:
        tokens: [log-probability, None, text] of each token of the answer.
        top: the same of the likeliest at each place.

    Raises:
        RequestFailedError: no choice is among what was told.
        UnsupportedFeatureError: it does not tell the best ones apart.
    """
    scores = [_along(choice, tokens, top, numbers) for choice in choices]
    means = [fmean(score.logprobs) for score in scores]
    best = max(means)
    if best == -inf:
        answer = "".join(text for _, _, text in tokens)
        raise RequestFailedError(
            f"the model's answer {answer!r:.80} leads to none of {list(choices)!r:.200}; ask for one of them"
        )
    if means.count(best) > 1:
        equal = [choice for choice, mean in zip(choices, means, strict=True) if mean == best]
        raise UnsupportedFeatureError(
            f"the choices {equal!r:.200} begin alike, and this endpoint tells the likelihood of their beginning only; "
            "word them so that they differ from the first letters on"
        )
    return scores


def _along(
    choice: str, tokens: Sequence[list[Any]], top: Sequence[list[list[Any]]], numbers: TokenNumbers
) -> ChoiceScore:
    rest, ids, logprobs = choice, list[int](), list[float]()
    for (logprob, _, text), likeliest in zip(tokens, top, strict=True):
        if not rest:
            break
        leading = [(logprob, text)] if _leads(text, rest) else []
        others = [(p, t) for p, _, t in likeliest if _leads(t, rest)]
        best = max(leading or others, default=(-inf, ""))
        ids.append(numbers[best[1]])
        logprobs.append(float(best[0]))
        if not leading:
            break
        rest = rest[len(text) :]
    return ChoiceScore(tuple(ids), tuple(logprobs)) if ids else ChoiceScore((numbers[""],), (-inf,))


def _leads(token: str, rest: str) -> bool:
    """Whether a token is a beginning of a choice's rest, or the other way round."""
    return bool(token) and (rest.startswith(token) or token.startswith(rest))
