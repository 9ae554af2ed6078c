import os
import stat

import pytest

from graftlm.layers.sealed_file import find_flaw, find_other_writers, seal

ROOT, USER, OTHER = 0, 1000, 1001


def status(owner, mode):
    return os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, owner, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("owner", [ROOT, USER])
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_file_that_only_the_user_and_root_can_write_is_trusted(owner, mode):
    assert find_other_writers(status(owner, mode), USER) is None


@pytest.mark.parametrize(
    ("owner", "mode", "user", "reason"),
    [
        (ROOT, 0o775, USER, "its mode drwxrwxr-x lets other users write to it"),
        (USER, 0o702, USER, "its mode drwx----w- lets other users write to it"),
        (OTHER, 0o700, USER, "it belongs to user 1001, neither to this user (1000) nor to root"),
        (USER, 0o777, ROOT, "it belongs to user 1000, neither to this user (0) nor to root"),
    ],
)
def test_a_file_that_others_can_write_is_not_trusted_with_the_reason(owner, mode, user, reason):
    assert find_other_writers(status(owner, mode), user) == reason


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 100])
def test_a_seal_is_valid_until_a_byte_changes(tmp_path, content):
    file = tmp_path / "library.so"
    file.write_bytes(content)
    seal(file)
    assert find_flaw(file) is None
    sealed = file.read_bytes()
    assert sealed.startswith(content)
    changed = [sealed[:-1], sealed + b"x", sealed[1:], content, bytes(len(sealed)), sealed[:-1] + b"\0"]
    for damaged in (*changed, bytes([sealed[0] ^ 1]) + sealed[1:]):
        file.write_bytes(damaged)
        assert "do not end with their SHA-256" in find_flaw(file)


def test_only_a_regular_file_is_accepted(tmp_path):
    assert find_flaw(tmp_path) == "is not a regular file"
    with pytest.raises(FileNotFoundError):
        find_flaw(tmp_path / "missing")
