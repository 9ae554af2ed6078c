"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from graftlm.contracts import StorageContext
from graftlm.testing import KVStorageConformance

from graftlm_new_plugin import provide_kv_storages


def create(context, path, **options):
    (provider,) = provide_kv_storages()
    return provider.create(provider.options(path=path, **options), context)


class TestContract(KVStorageConformance):
    damages = ("a flipped byte", "a short block", "a missing block")

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def create(self, context):
        return create(context, self.folder / "blocks.sqlite")

    def create_limited(self, context, num_blocks):
        return create(context, self.folder / "limited.sqlite", max_bytes=num_blocks * context.block_bytes)

    def damage(self, name, context, key):
        change = {
            "a flipped byte": "UPDATE blocks SET checksum = checksum + 1 WHERE key = ?",
            "a short block": "UPDATE blocks SET data = x'00' WHERE key = ?",
            "a missing block": "DELETE FROM blocks WHERE key = ?",
        }[name]
        with closing(sqlite3.connect(self.folder / "blocks.sqlite")) as database, database:
            database.execute(change, (key,))


def test_what_another_process_locks_is_refused_and_counted(tmp_path):
    storage = create(StorageContext(b"model", 4), tmp_path / "blocks.sqlite", timeout_s=0.01)
    with closing(sqlite3.connect(tmp_path / "blocks.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert storage.put(b"key", np.zeros(4, np.uint8)) is False
    assert storage.stats().failures == 1
    assert storage.put(b"key", np.zeros(4, np.uint8)) is True
    storage.close()
