import io

import pytest

from graftlm.checkpoint import watch_reading


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def test_progress_is_announced_once_per_20_percent(folder):
    stages = []
    with watch_reading(folder, stages.append, large_bytes=1000) as on_read:
        for read_bytes in (150, 100, 10, 390, 50, 290, 10):
            on_read(read_bytes)
    assert stages == [f"loading weights, {percent} %" for percent in (25, 65, 99)]


def test_a_terminal_shows_a_bar_that_is_cleared_at_the_end(folder):
    terminal = Terminal()
    with watch_reading(folder, terminal=terminal, large_bytes=1000) as on_read:
        on_read(500)
    assert "500/1,000 bytes" in terminal.getvalue() or "0.5/1.0 kB" in terminal.getvalue()


@pytest.mark.parametrize(("stream", "large_bytes"), [(io.StringIO(), 1000), (Terminal(), 1001)])
def test_files_and_small_checkpoints_show_no_bar(folder, stream, large_bytes):
    with watch_reading(folder, terminal=stream, large_bytes=large_bytes) as on_read:
        on_read(500)
    assert not stream.getvalue()
