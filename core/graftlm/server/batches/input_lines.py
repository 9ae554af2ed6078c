"""The input of a batch, which has one request per line, as a JSON object."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graftlm.server.batches.records import BatchProblem

__all__ = ["ENDPOINTS", "BatchLine", "check_input", "read_lines"]

#: Endpoints that batches may call.
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

_MAX_PROBLEMS: Final = 100
_MAX_ID_LEN: Final = 512


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch.

    Attributes:
        custom_id: the client's id of the request, repeated in the result.
        url: the endpoint, one of ENDPOINTS.
        body: the body of the request.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yield the requests of an input in which `check_input` found no problem."""
    with path.open("rb") as file:
        for text in file:
            if text.strip():
                value = json.loads(text)
                yield BatchLine(value["custom_id"], value["url"], value["body"])


def check_input(path: Path, endpoint: str | None, max_requests: int) -> tuple[int, list[BatchProblem]]:
    """Return the number of requests in an input, and its problems.

    Args:
        endpoint: the endpoint that every request must call; None for any of ENDPOINTS.
    """
    problems: list[BatchProblem] = []
    seen: set[str] = set()
    count = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            count += 1
            if count > max_requests:
                problem = BatchProblem("too_many_tasks", f"a batch may have at most {max_requests} requests", number)
                return count, [*problems, problem]
            problem_of_line = _problem(text, number, endpoint, seen)
            if problem_of_line is not None:
                problems.append(problem_of_line)
            if len(problems) == _MAX_PROBLEMS:
                break
    if not count:
        problems.append(BatchProblem("empty_file", "the input has no requests"))
    return count, problems


def _problem(text: bytes, number: int, endpoint: str | None, seen: set[str]) -> BatchProblem | None:
    """Return the problem of a line, None if there is none. Adds the id of the request to `seen`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchProblem("invalid_json_line", f"the line is not JSON: {error}", number)
    if not isinstance(value, dict):
        return BatchProblem("invalid_json_line", "the line is not a JSON object", number)
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_LEN:
        return _wrong("custom_id", f"must be a string of 1 to {_MAX_ID_LEN} characters", number)
    if any("\ud800" <= character <= "\udfff" for character in custom_id):
        return _wrong("custom_id", "must be Unicode text, got half of a surrogate pair", number)
    if custom_id in seen:
        return BatchProblem(
            "duplicate_custom_id",
            f"custom_id {custom_id!r} is given twice; give each request a different one",
            number,
            "custom_id",
        )
    seen.add(custom_id)
    if value.get("method", "POST") != "POST":
        return _wrong("method", "must be POST", number)
    if url not in ENDPOINTS or (endpoint is not None and url != endpoint):
        return _wrong("url", f"must be {endpoint or 'one of ' + ', '.join(ENDPOINTS)}", number)
    if not isinstance(body, dict):
        return _wrong("body", "must be an object", number)
    if body.get("stream"):
        return _wrong("body.stream", "must be false: the results are in a file", number)
    return None


def _wrong(param: str, message: str, number: int) -> BatchProblem:
    return BatchProblem("invalid_request", f"{param} {message}", number, param)
