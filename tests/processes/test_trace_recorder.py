import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from graftlm.errors import ConfigError
from graftlm.processes.trace_lines import FinishedRequest
from graftlm.processes.trace_recorder import TraceRecorder

FULL_DISK = Path("/dev/full")


def request(arrived_s=0.0):
    return FinishedRequest(np.arange(20, dtype=np.int32), ((1, 2, 3),), arrived_s)


def test_requests_are_written_at_the_latest_when_the_recorder_closes(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, 16, clock=lambda: 100.0, wall_clock=lambda: 1000.0) as recorder:
        recorder.record(request(101.5))
        recorder.record(request(102.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [1_001_500, 1_002_000]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"]


def test_an_existing_file_is_continued_with_another_key(tmp_path):
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        with TraceRecorder(path, 16) as recorder:
            recorder.record(request())
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert not set(first["hash_ids"]) & set(second["hash_ids"])


@pytest.mark.parametrize(("before", "after"), [(None, 0o600), (0o600, 0o600), (0o644, 0o644)])
def test_a_new_file_is_private_and_a_readable_one_causes_a_warning(tmp_path, caplog, before, after):
    path = tmp_path / "trace.jsonl"
    if before is not None:
        path.touch()
        path.chmod(before)
    mask = os.umask(0)
    try:
        TraceRecorder(path, 16).close()
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == after
    assert ("other users may read" in caplog.text) == (after == 0o644)


def test_a_closed_recorder_records_nothing(tmp_path):
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 16)
    recorder.close()
    recorder.record(request())
    recorder.close()
    assert (tmp_path / "trace.jsonl").read_text() == ""


def test_a_file_that_cannot_be_opened_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"server\.record_trace: cannot append to .*: No such file or directory"):
        TraceRecorder(tmp_path / "none" / "trace.jsonl", 16)


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs a device that is always full")
def test_a_full_disk_is_logged_once_and_ends_the_recording(caplog):
    with caplog.at_level(logging.WARNING), TraceRecorder(FULL_DISK, 16) as recorder:
        for _ in range(5):
            recorder.record(request())
    (record,) = caplog.records
    assert record.getMessage() == "cannot write /dev/full: No space left on device; no more requests are recorded"


def test_requests_are_dropped_and_counted_if_too_many_wait(tmp_path, caplog):
    release = threading.Event()

    class SlowOutput(tuple):
        def __getitem__(self, index):
            release.wait(30)
            return super().__getitem__(index)

    path = tmp_path / "trace.jsonl"
    with caplog.at_level(logging.WARNING), TraceRecorder(path, 16, max_waiting=2) as recorder:
        recorder.record(FinishedRequest(np.arange(4, dtype=np.int32), (SlowOutput((1, 2)),), 0.0))
        for _ in range(6):
            recorder.record(request())
        release.set()
    num_lines = len(path.read_text().splitlines())
    (record,) = caplog.records
    assert num_lines in (2, 3)  # the thread may have taken up the first already, or not
    assert record.getMessage() == f"{7 - num_lines} request(s) were not recorded in {path}: the disk was too slow"
