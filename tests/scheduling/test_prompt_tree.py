"""The tree of waiting requests compared with a comparison of every pair of prompts."""

import random

import numpy as np
import pytest

from graftlm.scheduling.prompt_tree import PromptTree


def tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], dtype=np.int32)


def groups_of(node) -> list[tuple[int, int]]:
    """Return the groups of a request, smallest first: shared tokens and waiting requests."""
    groups = []
    group = node.group
    while group is not None:
        groups.append((group.num_tokens, group.num_waiting))
        group = group.parent
    return groups


def expected_groups(text: str, others: list[str], page_size: int) -> list[tuple[int, int]]:
    """Return the same by comparing prompts; of groups with equal requests, the one that shares most tokens."""
    sizes = {}
    for num_tokens in range(page_size, len(text) + 1, page_size):
        sizes[num_tokens] = sum(other[:num_tokens] == text[:num_tokens] for other in others)
    largest = {num_waiting: num_tokens for num_tokens, num_waiting in sizes.items() if num_waiting > 1}
    return sorted(((num_tokens, num_waiting) for num_waiting, num_tokens in largest.items()), reverse=True)


@pytest.mark.parametrize(
    ("page_size", "texts", "expected"),
    [
        (1, ["abc"], [[]]),
        (1, ["abc", "xyz"], [[], []]),
        (1, ["abcd", "abxy"], [[(2, 2)], [(2, 2)]]),
        (2, ["abcd", "abcx"], [[(2, 2)], [(2, 2)]]),
        (2, ["ab", "ax"], [[], []]),
        (1, ["ab", "abcd", "abcx"], [[(2, 3)], [(3, 2), (2, 3)], [(3, 2), (2, 3)]]),
        (1, ["same", "same"], [[(4, 2)], [(4, 2)]]),
        (4, ["abc", "abc"], [[], []]),
    ],
)
def test_a_group_has_all_requests_that_start_with_the_same_whole_pages(page_size, texts, expected):
    tree = PromptTree(page_size)
    nodes = [tree.add(tokens(text), "") for text in texts]
    assert [groups_of(node) for node in nodes] == expected


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_additions_and_removals_keep_the_groups_of_the_others_correct(page_size, seed):
    draw = random.Random(seed)
    tree = PromptTree(page_size)
    waiting = []
    for _ in range(300):
        if waiting and draw.random() < 0.45:
            _, node, namespace = waiting.pop(draw.randrange(len(waiting)))
            tree.remove(node, namespace)
        else:
            text = "".join(draw.choice("ab") for _ in range(draw.randrange(0, 12)))
            namespace = draw.choice(["", "tenant"])
            waiting.append((text, tree.add(tokens(text), namespace), namespace))
        for text, node, namespace in waiting:
            others = [other for other, _, theirs in waiting if theirs == namespace]
            assert groups_of(node) == expected_groups(text, others, page_size)


def test_namespaces_share_no_group():
    tree = PromptTree(1)
    nodes = [tree.add(tokens("abc"), namespace) for namespace in ("a", "b")]
    assert [node.group for node in nodes] == [None, None]


def test_an_empty_tree_keeps_nothing():
    tree = PromptTree(1)
    nodes = [(tree.add(tokens(text), "tenant"), "tenant") for text in ("abc", "abd", "x")]
    for node, namespace in nodes:
        tree.remove(node, namespace)
    assert len(tree) == 0
    assert not tree._roots
