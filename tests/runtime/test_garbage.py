import gc

import pytest

from graftlm.cli import serve
from graftlm.runtime.garbage import collection_paused


def test_the_collector_is_disabled_within_the_block_only():
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_ready_server_exempts_its_objects_from_collection(capsys):
    before = gc.get_freeze_count()
    objects = [[] for _ in range(100)]
    serve._announce("http://host:1")
    assert gc.get_freeze_count() >= before + len(objects)
    assert capsys.readouterr().out == "serving on http://host:1\n"
