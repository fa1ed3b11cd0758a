"""DDTree: the popped nodes are the most probable prefixes, each sees its ancestors alone, and the walk is lossless."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation.ddtree import ROOT, Tree, build_tree, grow_tree


def random_marginals(seed: int, depths: int, ranks: int) -> torch.Tensor:
    return torch.randn(depths, ranks, generator=torch.Generator().manual_seed(seed)) * 2


def prefix_of(tree: Tree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node != ROOT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(path))


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 40))
def test_the_nodes_are_the_most_probable_prefixes(seed: int, depths: int, budget: int) -> None:
    logits = random_marginals(seed, depths, 4)
    logp = torch.log_softmax(logits, -1).double()
    every = [path for depth in range(1, depths + 1) for path in itertools.product(range(4), repeat=depth)]
    score = {path: sum(float(logp[level, token]) for level, token in enumerate(path)) for path in every}
    wanted = sorted(score.values(), reverse=True)[:budget]
    tree = build_tree(logits, budget)
    found = sorted((score[prefix_of(tree, node)] for node in range(len(tree))), reverse=True)
    assert found == pytest.approx(wanted, abs=1e-4)
    assert len({prefix_of(tree, node) for node in range(len(tree))}) == len(tree)


def test_a_smaller_budget_is_the_beginning_of_a_larger_one() -> None:
    logits = random_marginals(5, 6, 30)
    large, small = build_tree(logits, 200), build_tree(logits, 17)
    assert small.tokens == large.tokens[:17]
    assert small.parents == large.parents[:17]


def test_a_node_sees_its_ancestors_and_itself_alone() -> None:
    tree = build_tree(random_marginals(2, 4, 6), 24)
    seen = tree.visible()
    for node in range(len(tree)):
        ancestors, at = {0, node + 1}, node
        while tree.parents[at] != ROOT:
            at = tree.parents[at]
            ancestors.add(at + 1)
        assert set(torch.nonzero(seen[node + 1]).flatten().tolist()) == ancestors
        assert len(ancestors) == tree.depths[node] + 1


def test_the_walk_follows_the_target_until_it_leaves_the_tree() -> None:
    tree = grow_tree([[-0.1, -2.0], [-0.2, -1.0]], [[5, 6], [7, 8]], budget=6)
    by_prefix = {prefix_of(tree, node): node for node in range(len(tree))}
    wanted = [0] * len(tree)
    wanted[by_prefix[5,]] = 8
    wanted[by_prefix[5, 8]] = 99
    assert tree.walk(wanted, root_wants=5) == ([by_prefix[5,], by_prefix[5, 8]], 99)
    assert tree.walk(wanted, root_wants=42) == ([], 42)


@given(st.integers(0, 200), st.integers(1, 60))
def test_accepted_on_a_known_text_is_what_the_walk_accepts(seed: int, budget: int) -> None:
    tree = build_tree(random_marginals(seed, 5, 3), 60)
    text = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    small = Tree(tree.tokens[:budget], tree.depths[:budget], tree.parents[:budget])
    wanted = [text[depth] for depth in small.depths]  # a target that always continues with the text
    assert len(small.walk(wanted, text[0])[0]) == tree.accepted(text, budget)


def test_a_reduced_vocabulary_names_the_targets_tokens() -> None:
    tree = build_tree(torch.tensor([[0.0, 3.0]]), 2, torch.tensor([40, 50]))
    assert tree.tokens == [50, 40]
