"""The index of a folder of block files: names, sizes and times of last use, in memory.

The path of a block's file has four parts:

    root / 32 hex digits: model, layout, format / 2 hex digits / 40 hex digits: the block .kv

Files and folders with other names are never read or removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BlockFolder", "Entry", "Listing", "block_name", "list_blocks"]

_KIND = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{40}\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{40}\.[0-9a-z-]+\.tmp")


def block_name(kind: str, key: bytes) -> str:
    """Return the path of a block relative to the root.

    Args:
        kind: name of the folder for blocks of one model, layout and format.
        key: key of any length; names have equal length and are evenly distributed over the subfolders.
    """
    digest = hashlib.sha256(key).hexdigest()
    return f"{kind}/{digest[:2]}/{digest[:40]}.kv"


@dataclass(frozen=True, slots=True)
class Entry:
    """Size and last use of a file.

    Attributes:
        num_bytes: size of the file in bytes.
        last_use_s: time when it was written or last read, in seconds since 1970.
    """

    num_bytes: int
    last_use_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that one walk through the folder found.

    Attributes:
        blocks: path relative to the root -> entry.
        temporary: path relative to the root -> entry, for files that a writer has not finished or has abandoned.
    """

    blocks: dict[str, Entry]
    temporary: dict[str, Entry]


def list_blocks(root: str, kind: str | None = None) -> Listing:
    """List the block files under a root without reading their contents. Files that disappear during this are left out.

    Args:
        root: the folder; the listing is empty if it does not exist.
        kind: list only the blocks of this kind; None: all kinds.

    Raises:
        OSError: a folder cannot be listed.
    """
    listing = Listing({}, {})
    for folder in _children(root, _KIND):
        if kind is not None and folder.name != kind:
            continue
        for shard in _children(folder.path, _SHARD):
            for file in _files(shard.path):
                _add(listing, f"{folder.name}/{shard.name}/{file.name}", file)
    return listing


def _children(path: str, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from [e for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return


def _files(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _add(listing: Listing, name: str, file: os.DirEntry[str]) -> None:
    is_block = _BLOCK.fullmatch(file.name)
    if not is_block and not _TEMPORARY.fullmatch(file.name):
        return
    try:
        status = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode):
        (listing.blocks if is_block else listing.temporary)[name] = Entry(status.st_size, status.st_mtime)


class BlockFolder:
    """The index of a folder between two walks. Not thread-safe: its owner holds a lock.

    Args:
        kind: the kind whose blocks are also counted separately.

    Attributes:
        total_bytes: size of all files.
        own_bytes: size of the files of `kind`.
        num_own: number of files of `kind`.
    """

    def __init__(self, kind: str) -> None:
        self._prefix = kind + "/"
        self._entries: dict[str, Entry] = {}
        self.total_bytes = 0
        self.own_bytes = 0
        self.num_own = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def last_use_s(self, name: str) -> float:
        """Return the time of a file's last use, in seconds since 1970; 0 for a file that is not in the index."""
        entry = self._entries.get(name)
        return entry.last_use_s if entry else 0.0

    def add(self, name: str, entry: Entry) -> None:
        """Add a file, or replace its entry."""
        self.remove(name)
        self._entries[name] = entry
        self._count(name, entry.num_bytes, 1)

    def remove(self, name: str) -> None:
        """Remove a file's entry, if there is one."""
        entry = self._entries.pop(name, None)
        if entry:
            self._count(name, -entry.num_bytes, -1)

    def replace(self, blocks: dict[str, Entry], since_s: float) -> None:
        """Replace the index by the result of a walk.

        Args:
            blocks: the files that the walk found.
            since_s: time when the walk began. Files used since then stay in the index, because the walk may have missed
                them. A file's time may be wrong, even years in the future. If it is later than `since_s`, the start of
                the first walk that found the file counts as its last use, so that the file can become the oldest.
        """
        known, self._entries = self._entries, {}
        self.total_bytes = self.own_bytes = self.num_own = 0
        for name, entry in blocks.items():
            seen = Entry(entry.num_bytes, min(entry.last_use_s, since_s))
            before = known.get(name)
            if before and (entry.last_use_s > since_s or before.last_use_s > entry.last_use_s):
                seen = Entry(entry.num_bytes, before.last_use_s)
            self.add(name, seen)
        for name, entry in known.items():
            if entry.last_use_s >= since_s and name not in self._entries:
                self.add(name, entry)

    def oldest(self, num_bytes: int) -> list[str]:
        """Return the least recently used files that have at least `num_bytes` in total; all files if they have less."""
        names, found = [], 0
        for name in sorted(self._entries, key=lambda name: self._entries[name].last_use_s):
            if found >= num_bytes:
                break
            names.append(name)
            found += self._entries[name].num_bytes
        return names

    def _count(self, name: str, num_bytes: int, num_blocks: int) -> None:
        self.total_bytes += num_bytes
        if name.startswith(self._prefix):
            self.own_bytes += num_bytes
            self.num_own += num_blocks
