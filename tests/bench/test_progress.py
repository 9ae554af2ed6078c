"""The progress bar counts on a terminal, and is not shown elsewhere."""

import io

from rich.console import Console

from graftlm.bench import load_progress
from graftlm.bench.records import Failure, RequestRecord


def show(is_terminal):
    """Return the output of a run of three requests, of which one fails."""
    written = io.StringIO()
    with load_progress(3, Console(file=written, force_terminal=is_terminal, width=100)) as observer:
        for failure in (None, Failure("timeout", ""), None):
            observer.sent()
            observer.ended(RequestRecord(index=0, asked_tokens=1, sent_s=0.0, end_s=1.0, failure=failure))
    return written.getvalue()


def test_a_terminal_shows_how_many_requests_were_sent_and_failed():
    assert "3/3" in show(True)
    assert "3 sent, 1 failed" in show(True)


def test_a_file_gets_no_progress_bar():
    assert show(False).strip() == ""
