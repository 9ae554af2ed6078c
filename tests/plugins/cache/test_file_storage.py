"""Files of blocks: the conformance kit, every kind of damage to real files, and media with errors."""

import logging
import os
import shutil
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from pydantic import ValidationError

import graftlm_cache
from graftlm.contracts import StorageContext
from graftlm.errors import ConfigError
from graftlm.testing import KVStorageConformance
from graftlm_cache.block_file import HEADER_BYTES
from graftlm_cache.block_folder import block_name
from graftlm_cache.file_storage import FileStorage, FileStorageOptions

BLOCK_BYTES = 1000
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES
CONTEXT = StorageContext(b"model-1", BLOCK_BYTES)

#: Positions of bytes in the header, by field.
REGIONS = {"magic": 0, "version": 8, "padding": 12, "fingerprint": 16, "key": 50, "length": 80, "checksum": 90}
FLIPS = REGIONS | {"first byte of data": HEADER_BYTES, "last byte of data": FILE_BYTES - 1}
LENGTHS = {
    "empty": 0,
    "within the magic": 5,
    "without its last header byte": HEADER_BYTES - 1,
    "header alone": HEADER_BYTES,
    "half": FILE_BYTES // 2,
    "without its last byte": FILE_BYTES - 1,
}


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = time.time()

    def __call__(self):
        return self.now


def options(path, num_blocks=1000):
    return FileStorageOptions(path=path, max_bytes=num_blocks * FILE_BYTES)


def block(number):
    return np.full(BLOCK_BYTES, number, np.uint8)


def key(number):
    return number.to_bytes(8, "little")


def file_of(root, which, context=CONTEXT):
    """Return a block's file, found by the contents of the folder."""
    (found,) = [file for file in files_in(root) if file.name == Path(block_name("", which)).name]
    return found


def files_in(root):
    return sorted(file for file in Path(root).rglob("*") if file.is_file())


def got(storage, number):
    out = np.empty(BLOCK_BYTES, np.uint8)
    return bool(storage.get(key(number), out)) and bool((out == number).all())


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def damage_file(name, file):
    match name.partition(": ")[::2]:
        case "flipped", region:
            flip(file, FLIPS[region])
        case "cut", length:
            os.truncate(file, LENGTHS[length])
        case "another file's content", _:
            file.write_bytes(b"not a block at all" * 100)
        case "zeros", _:
            file.write_bytes(bytes(file.stat().st_size))
        case "longer", _:
            file.write_bytes(file.read_bytes() + b"\0")
        case "deleted", _:
            file.unlink()


DAMAGES = (
    *[f"flipped: {region}" for region in FLIPS],
    *[f"cut: {length}" for length in LENGTHS],
    "another file's content",
    "zeros",
    "longer",
    "deleted",
)


class TestFileStorage(KVStorageConformance):
    """`file` keeps the contract."""

    damages = DAMAGES

    @cached_property
    def folder(self):
        return TemporaryDirectory()

    def create(self, context):
        return FileStorage(FileStorageOptions(path=self.folder.name, max_bytes="100MiB"), context)

    def create_limited(self, context, num_blocks):
        return FileStorage(options(self.folder.name, num_blocks), context)

    def damage(self, name, context, key):
        damage_file(name, file_of(self.folder.name, key))

    def break_medium(self):
        shutil.rmtree(self.folder.name)
        Path(self.folder.name).write_text("a file where the folder was")

    def teardown_method(self):
        path = Path(self.folder.name)
        if path.is_file():
            path.unlink()
            path.mkdir()
        self.folder.cleanup()


# -- Damage


@pytest.fixture
def storage(tmp_path):
    return FileStorage(options(tmp_path), CONTEXT)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(f"flipped: {region}", "foreign") for region in ("magic", "version", "fingerprint", "key", "length")]
    + [(f"flipped: {region}", "corrupt") for region in ("checksum", "first byte of data", "last byte of data")]
    + [(f"cut: {length}", "corrupt") for length in LENGTHS]
    + [("another file's content", "foreign"), ("zeros", "foreign"), ("longer", "corrupt")],
)
def test_a_bad_file_is_counted_by_kind_and_deleted(storage, tmp_path, name, kind):
    storage.put(key(1), block(1))
    file = file_of(tmp_path, key(1))
    damage_file(name, file)
    assert not got(storage, 1)
    stats = storage.stats()
    assert {"corrupt": stats.corrupt, "foreign": stats.foreign}[kind] == 1
    assert stats.corrupt + stats.foreign == 1
    assert not file.exists()
    assert stats.num_bytes == 0


def test_no_block_with_a_flipped_bit_is_returned(tmp_path):
    storage = FileStorage(FileStorageOptions(path=tmp_path, max_bytes="1MiB"), StorageContext(b"small", 16))
    out = np.empty(16, np.uint8)
    for position in range(HEADER_BYTES + 16):
        storage.put(b"key", np.arange(16, dtype=np.uint8))
        flip(file_of(tmp_path, b"key"), position)
        assert not storage.get(b"key", out), f"served with byte {position} flipped"


def test_a_file_renamed_to_another_key_is_foreign(storage, tmp_path):
    storage.put(key(1), block(1))
    storage.put(key(2), block(2))
    shutil.copyfile(file_of(tmp_path, key(1)), file_of(tmp_path, key(2)))
    assert not got(storage, 2)
    assert storage.stats().foreign == 1
    assert got(storage, 1)


def test_a_file_of_another_model_is_foreign(storage, tmp_path):
    other = FileStorage(options(tmp_path / "other"), StorageContext(b"model-2", BLOCK_BYTES))
    for each in (storage, other):
        each.put(key(1), block(1))
    mine = next(file for file in files_in(tmp_path) if "other" not in file.parts)
    shutil.copyfile(file_of(tmp_path / "other", key(1)), mine)
    assert not got(storage, 1)
    assert storage.stats().foreign == 1
    assert not mine.exists()


def test_other_files_in_the_folder_are_not_touched(tmp_path):
    theirs = ["notes.txt", "0" * 32, "ab/cd.kv", f"{'0' * 32}/zz/{'0' * 40}.kv", f"{'0' * 32}/00/README"]
    for name in theirs:
        if name != "0" * 32:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(bytes(10 * FILE_BYTES))
    storage = FileStorage(options(tmp_path, num_blocks=2), CONTEXT)
    for number in range(5):
        storage.put(key(number), block(number))
    storage.clear()
    assert [str(file.relative_to(tmp_path)) for file in files_in(tmp_path)] == sorted(set(theirs) - {"0" * 32})


# -- Media with errors


def test_a_deleted_folder_is_created_again(storage, tmp_path):
    storage.put(key(1), block(1))
    shutil.rmtree(tmp_path)
    assert not got(storage, 1)
    assert storage.contains([key(1)]) == 0
    assert storage.put(key(2), block(2))
    assert got(storage, 2)
    assert (storage.stats().failures, storage.stats().num_blocks) == (0, 1)


REFUSING = """
import os, resource, signal, sys
import numpy as np
from graftlm.contracts import StorageContext
from graftlm_cache.file_storage import FileStorage, FileStorageOptions

how, path = sys.argv[1:]
storage = FileStorage(FileStorageOptions(path=path, max_bytes="1MiB"), StorageContext(b"model-1", 1000))
data, out = np.ones(1000, np.uint8), np.empty(1000, np.uint8)
assert storage.put(b"held", data)
if how == "no space":  # a write past the limit fails half-way, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
elif how == "no file handles":
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
elif how == "not allowed":
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o500)
    if os.geteuid() == 0:
        os.seteuid(65534)
results = [storage.put(str(number).encode(), data) for number in range(3)]
held = storage.get(b"held", out)
stats = storage.stats()
print(results, held, stats.failures > 0, stats.num_blocks)
"""


@pytest.mark.parametrize(
    ("how", "is_readable"), [("no space", True), ("no file handles", False), ("not allowed", None)]
)
def test_an_error_of_the_medium_is_counted_and_logged_once(tmp_path, how, is_readable):
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, how, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    results, held, is_counted, num_blocks = done.stdout.strip().rsplit(" ", 3)[0], *done.stdout.split()[-3:]
    assert (results, is_counted, num_blocks) == ("[False, False, False]", "True", "1"), done.stderr
    assert is_readable is None or held == str(is_readable)
    lines = [line for line in done.stderr.splitlines() if "cannot write" in line]
    assert len(lines) == 1, done.stderr
    assert [file for file in files_in(tmp_path) if file.suffix == ".tmp"] == []


def test_failures_are_logged_once_per_kind(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        storage = FileStorage(options(file), CONTEXT)
        for number in range(5):
            assert not storage.put(key(number), block(number))
            assert not got(storage, number)
            assert storage.contains([key(number)]) == 0
    kinds = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert sorted(kinds) == sorted(set(kinds))
    assert storage.stats().failures >= 15
    assert file.read_text() == "no folder"


def test_a_folder_in_the_place_of_a_block_is_a_miss(tmp_path):
    storage = FileStorage(options(tmp_path, num_blocks=2), CONTEXT)
    storage.put(key(1), block(1))
    file = file_of(tmp_path, key(1))
    file.unlink()
    file.mkdir()
    assert not got(storage, 1)
    assert not storage.put(key(1), block(1))
    assert storage.put(key(2), block(2))
    assert FileStorage(options(tmp_path, num_blocks=2), CONTEXT).stats().num_blocks == 1


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_link_in_the_place_of_a_block_is_a_miss_and_replaced(storage, tmp_path, make):
    storage.put(key(1), block(1))
    file = file_of(tmp_path, key(1))
    file.unlink()
    make(file)
    assert not got(storage, 1)
    assert storage.put(key(1), block(1))
    assert got(storage, 1)
    file.unlink()
    make(file)
    assert storage.contains([key(1)]) in (0, 1)
    assert storage.put(key(1), block(1))
    assert got(storage, 1)


@pytest.mark.parametrize("length", LENGTHS.values())
def test_a_truncated_file_is_written_again(storage, tmp_path, length):
    storage.put(key(1), block(1))
    os.truncate(file_of(tmp_path, key(1)), length)
    assert storage.put(key(1), block(1))
    assert storage.stats().corrupt == 1
    assert got(storage, 1)


# -- Other threads


@pytest.mark.parametrize("call", ["get", "contains", "put"])
def test_a_block_stored_during_a_miss_is_counted(storage, tmp_path, monkeypatch, call):
    def store_after_a_miss(look):
        def patched(path, *arguments, **options):
            try:
                return look(path, *arguments, **options)
            except FileNotFoundError:
                monkeypatch.undo()
                assert storage.put(key(1), block(1))
                raise

        return patched

    for name in ("open", "stat"):
        monkeypatch.setattr(os, name, store_after_a_miss(getattr(os, name)))
    match call:
        case "get":
            assert not got(storage, 1)
        case "contains":
            assert storage.contains([key(1)]) == 0
        case "put":
            assert storage.put(key(1), block(1))
    assert storage.stats().num_blocks == len(files_in(tmp_path)) == 1


def test_a_block_stored_during_its_removal_is_counted(storage, tmp_path, monkeypatch):
    def store_after(unlink):
        def patched(path):
            unlink(path)
            monkeypatch.undo()
            assert storage.put(key(1), block(1))

        return patched

    storage.put(key(1), block(1))
    flip(file_of(tmp_path, key(1)), HEADER_BYTES)
    monkeypatch.setattr(os, "unlink", store_after(os.unlink))
    assert not got(storage, 1)
    assert storage.stats().num_blocks == len(files_in(tmp_path)) == 1


def test_a_block_removed_during_a_read_is_not_counted(storage, tmp_path, monkeypatch):
    def clear_after(close):
        def patched(fd):
            close(fd)
            monkeypatch.undo()
            storage.clear()

        return patched

    storage.put(key(1), block(1))
    monkeypatch.setattr(os, "close", clear_after(os.close))
    assert got(storage, 1)
    assert storage.stats().num_blocks == len(files_in(tmp_path)) == 0


# -- Other processes


def test_blocks_that_another_process_adds_or_removes_are_noticed(storage, tmp_path):
    other = FileStorage(options(tmp_path), CONTEXT)
    other.put(key(1), block(1))
    assert storage.contains([key(1)]) == 1
    assert got(storage, 1)
    assert storage.stats().num_blocks == 1
    other.clear()
    assert not got(storage, 1)
    assert storage.stats().num_blocks == 0
    assert storage.put(key(1), block(1))
    assert got(other, 1)


SHARING = """
import sys
import numpy as np
from graftlm.contracts import StorageContext
from graftlm_cache.file_storage import FileStorage, FileStorageOptions

path, seed, max_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
storage = FileStorage(FileStorageOptions(path=path, max_bytes=max_bytes), StorageContext(b"model-1", 1000))
draw, out = np.random.default_rng(seed), np.empty(1000, np.uint8)
for number in draw.integers(0, 100, 600):
    key = int(number).to_bytes(8, "little")
    if draw.random() < 0.5:
        assert storage.put(key, np.full(1000, number, np.uint8))
    elif storage.get(key, out):
        assert (out == number).all()
stats = storage.stats()
assert stats.failures == stats.corrupt == stats.foreign == 0, stats
assert stats.evicted > 0
"""


def test_processes_share_a_folder_and_exceed_its_limit_only_slightly(tmp_path):
    limit = 40
    writers = [
        subprocess.Popen([sys.executable, "-c", SHARING, str(tmp_path), str(seed), str(limit * FILE_BYTES)])
        for seed in range(3)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    files = files_in(tmp_path)
    assert len(files) <= limit * (1 + (len(writers) - 1) / 20)
    assert {file.suffix for file in files} == {".kv"}


def test_two_storages_exceed_the_limit_by_at_most_a_twentieth(tmp_path):
    limit = 40
    storages = [FileStorage(options(tmp_path, limit), CONTEXT) for _ in range(2)]
    most = 0
    for number in range(200):
        assert storages[number % 2].put(key(number), block(number % 256))
        most = max(most, len(files_in(tmp_path)))
    assert limit * 0.9 < most <= limit * 21 / 20


def test_only_the_owner_can_read_a_file(storage, tmp_path):
    storage.put(key(1), block(1))
    assert file_of(tmp_path, key(1)).stat().st_mode & 0o077 == 0


# -- The size limit


def test_the_least_recently_used_block_is_deleted_first(tmp_path):
    clock = Clock()
    storage = FileStorage(options(tmp_path, num_blocks=3), CONTEXT, clock)
    for number in (1, 2, 3):
        clock.now += 1
        storage.put(key(number), block(number))
    clock.now += 1
    assert got(storage, 1)
    storage.put(key(4), block(4))
    assert [number for number in range(1, 5) if got(storage, number)] == [1, 3, 4]
    assert storage.stats().evicted == 1


def test_a_hit_counts_for_the_order_after_a_restart(tmp_path):
    clock = Clock()
    clock.now += 100
    storage = FileStorage(options(tmp_path, num_blocks=3), CONTEXT, clock)
    for number in (1, 2, 3):
        clock.now += 100
        storage.put(key(number), block(number))
    clock.now += 100
    assert got(storage, 1)
    again = FileStorage(options(tmp_path, num_blocks=3), CONTEXT, clock)
    again.put(key(4), block(4))
    assert got(again, 1)


def test_a_file_is_not_touched_at_every_hit(tmp_path):
    clock = Clock()
    storage = FileStorage(options(tmp_path), CONTEXT, clock)
    storage.put(key(1), block(1))
    times = []
    for passed in (1, 30, 100, 1):
        clock.now += passed
        assert got(storage, 1)
        times.append(file_of(tmp_path, key(1)).stat().st_mtime)
    assert times[0] == times[1] < times[2] == times[3]


def test_the_limit_applies_to_all_models_of_the_folder(tmp_path):
    old = FileStorage(options(tmp_path, num_blocks=4), StorageContext(b"old", BLOCK_BYTES))
    for number in range(4):
        old.put(key(number), block(number))
    new = FileStorage(options(tmp_path, num_blocks=4), CONTEXT)
    for number in range(3):
        assert new.put(key(number), block(number))
    assert len(files_in(tmp_path)) == 4
    assert (new.stats().num_blocks, new.stats().evicted) == (3, 3)


def test_a_smaller_limit_applies_from_the_next_put_on(tmp_path):
    large = FileStorage(options(tmp_path, num_blocks=50), CONTEXT)
    for number in range(50):
        large.put(key(number), block(number))
    small = FileStorage(options(tmp_path, num_blocks=10), CONTEXT)
    small.put(key(99), block(99))
    assert len(files_in(tmp_path)) <= 10


def test_files_of_dead_writers_are_removed_and_current_ones_are_not(tmp_path):
    clock = Clock()
    storage = FileStorage(options(tmp_path), CONTEXT, clock)
    storage.put(key(1), block(1))
    (file,) = files_in(tmp_path)
    dead, living = file.with_suffix(".123-abcd.tmp"), file.with_suffix(".124-abcd.tmp")
    for left, age_s in ((dead, 3600), (living, 5)):
        left.write_bytes(b"half a bl")
        os.utime(left, (clock.now - age_s, clock.now - age_s))
    again = FileStorage(options(tmp_path), CONTEXT, clock)
    assert files_in(tmp_path) == sorted([file, living])
    assert again.stats().num_blocks == 1


def test_unfinished_files_of_others_count_towards_the_limit(tmp_path):
    clock = Clock()
    FileStorage(options(tmp_path), CONTEXT, clock).put(key(1), block(1))
    (file,) = files_in(tmp_path)
    for i in range(6):
        left = file.with_suffix(f".{i}-abcd.tmp")
        left.write_bytes(bytes(FILE_BYTES))
        os.utime(left, (clock.now, clock.now))
    storage = FileStorage(options(tmp_path, num_blocks=10), CONTEXT, clock)
    for number in range(2, 20):
        assert storage.put(key(number), block(number))
        assert sum(file.stat().st_size for file in files_in(tmp_path)) <= 10 * FILE_BYTES
    clock.now += 3600
    for number in range(20, 40):
        assert storage.put(key(number), block(number))
    assert FileStorage(options(tmp_path), CONTEXT, clock).stats().num_blocks >= 9, "what was left is removed at last"


def test_files_with_a_future_date_are_also_evicted(tmp_path):
    clock = Clock()
    storage = FileStorage(options(tmp_path), CONTEXT, clock)
    for number in range(5):
        storage.put(key(number), block(number))
    for file in files_in(tmp_path):
        os.utime(file, (2**33, 2**33))
    storage = FileStorage(options(tmp_path, num_blocks=10), CONTEXT, clock)
    for number in range(5, 40):
        clock.now += 1
        storage.put(key(number), block(number))
    assert not any(storage.contains([key(number)]) for number in range(5))
    assert len(files_in(tmp_path)) <= 10


# -- Options


@pytest.mark.parametrize("path", ["kv/a\0b", "~nosuchuser77/kv"])
def test_an_impossible_path_is_refused(path):
    with pytest.raises(ValidationError, match=r"NUL|cannot be expanded"):
        FileStorageOptions(path=path)


@pytest.mark.parametrize(
    ("given", "num_bytes"), [(5000, 5000), ("10GiB", 10 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9)]
)
def test_sizes_are_numbers_or_have_a_unit(given, num_bytes):
    assert FileStorageOptions(path="x", max_bytes=given).max_bytes == num_bytes


@pytest.mark.parametrize("given", [0, -1, "10 gibbons", "", "-5MiB", None])
def test_an_invalid_size_is_refused(given):
    with pytest.raises(ValidationError):
        FileStorageOptions(path="x", max_bytes=given)


def test_a_limit_below_one_block_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"max_bytes .* is 1000, but one block needs 1120 bytes; set a larger"):
        FileStorage(FileStorageOptions(path=tmp_path, max_bytes=1000), CONTEXT)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    FileStorage(FileStorageOptions(path="~/kv"), CONTEXT).put(key(1), block(1))
    assert len(files_in(tmp_path / "kv")) == 1


def test_fsync_does_not_change_the_stored_block(tmp_path):
    storage = FileStorage(FileStorageOptions(path=tmp_path, fsync=True), CONTEXT)
    assert storage.put(key(1), block(1))
    assert got(storage, 1)


def test_the_provider_creates_a_file_storage(tmp_path):
    (provider,) = graftlm_cache.provide_kv_storages()
    assert provider.name == "file"
    assert isinstance(provider.create(provider.options(path=tmp_path), CONTEXT), FileStorage)
