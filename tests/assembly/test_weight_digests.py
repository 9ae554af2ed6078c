"""Hashes of weight files are kept while the files stay the same, in a file that only the user can read and write."""

import json
import os
import time

import pytest

from graftlm.assembly.weight_digests import WeightDigests, user_cache_dir

SIZE = 2**26


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(SIZE)  # a sparse file
    return file


def digest(file, memory, age_s=60):
    return WeightDigests(memory, lambda: time.time() + age_s).of([file])[0]


def forge(memory, digest):
    """Change the stored hash, so that a test sees whether it is used."""
    content = json.loads(memory.read_text())
    for entry in content.values():
        entry[1] = digest
    memory.write_text(json.dumps(content))


def test_a_hash_is_stored_in_a_private_file(file, memory):
    first = digest(file, memory)
    assert digest(file, memory) == first
    assert memory.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in memory.parent.iterdir()] == ["weights.json"]
    forge(memory, "77" * 32)
    assert digest(file, memory) == b"\x77" * 32


def test_a_changed_file_is_hashed_again_even_with_equal_time_and_size(file, memory):
    first, status = digest(file, memory), file.stat()
    with file.open("r+b") as stream:
        stream.seek(SIZE // 2)
        stream.write(b"x")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(file, memory) != first


def test_the_hash_of_a_file_written_just_now_is_not_stored(file, memory):
    digest(file, memory, age_s=0)
    assert not memory.exists()


@pytest.mark.parametrize("damage", ["[]", "{", '{"x": 1}', "\xff"])
def test_a_damaged_store_is_not_used(file, memory, damage):
    first = digest(file, memory)
    memory.write_text(damage, encoding="latin-1")
    assert digest(file, memory) == first
    assert digest(file, memory) == first


@pytest.mark.parametrize("forged", ["", "zz" * 32, "77"])
def test_a_malformed_stored_hash_is_not_used(file, memory, forged):
    first = digest(file, memory)
    forge(memory, forged)
    assert digest(file, memory) == first


def test_a_store_that_other_users_can_write_is_not_used(file, memory):
    first = digest(file, memory)
    forge(memory, "77" * 32)
    memory.chmod(0o666)
    assert digest(file, memory) == first


def test_without_a_folder_for_the_store_files_are_hashed_each_time(file, tmp_path):
    (tmp_path / "file").touch()
    assert digest(file, tmp_path / "file" / "weights.json") == digest(file, None)


def test_hashes_of_missing_files_are_removed(file, memory, tmp_path):
    digest(file, memory)
    moved = file.rename(tmp_path / "moved.safetensors")
    digest(moved, memory)
    assert list(json.loads(memory.read_text())) == [str(moved)]


@pytest.mark.parametrize(("base", "expected"), [("/x", "/x/graftlm"), ("relative", None), ("", None)])
def test_the_store_is_in_the_users_cache_folder(base, expected):
    folder = user_cache_dir({"XDG_CACHE_HOME": base})
    assert str(folder) == (expected or os.path.expanduser("~/.cache/graftlm"))
