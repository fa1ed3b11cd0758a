"""DDTree: the most probable prefixes under the slots' marginals, as a tree that the target verifies in one pass.

From the B-1 marginals of ONE drafter pass and a budget of M nodes, a best-first search pops prefixes in order of their
probability under the product of marginals; each popped prefix is a node, whose next sibling (the next rank at its
depth) and first child (rank 0 one deeper) are pushed. Source: DDTree, arXiv 2604.12989.

A smaller budget's tree is the beginning of a larger one's. Shapes: M nodes, R ranks kept per depth, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RANKS = 64
ROOT = -1


@dataclass(frozen=True)
class Tree:
    """Nodes in popping order: token, depth (1 below the root) and parent (an earlier node; ROOT = -1)."""

    tokens: list[int]
    depths: list[int]
    parents: list[int]

    def __len__(self) -> int:
        """M: nodes besides the root."""
        return len(self.tokens)

    def visible(self) -> Tensor:
        """Who sees whom in the pass, [1 + M, 1 + M] bool, the root first: ancestors and the node itself."""
        size = len(self) + 1
        seen = torch.zeros(size, size, dtype=torch.bool)
        seen[0, 0] = True
        for node, parent in enumerate(self.parents, start=1):
            seen[node] = seen[parent + 1]
            seen[node, node] = True
        return seen

    def walk(self, wanted: Sequence[int], root_wants: int) -> tuple[list[int], int]:
        """Follow the target's choices from the root: (accepted nodes in order, the token that the target adds).

        wanted[i]: the target's token after node i; root_wants: its token after the root.
        """
        children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path: list[int] = []
        token = root_wants
        while (node := children.get((path[-1] if path else ROOT, token))) is not None:
            path.append(node)
            token = wanted[node]
        return path, token

    def accepted(self, continuation: Sequence[int], budget: int) -> int:
        """Nodes among the first `budget` that spell the beginning of `continuation`, the target's own text."""
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents[:budget], self.tokens[:budget], strict=True))
        }
        node = ROOT
        for count, token in enumerate(continuation):
            found = children.get((node, token))
            if found is None:
                return count
            node = found
        return len(continuation)


def build_tree(logits: Tensor, budget: int, token_ids: Tensor | None = None) -> Tree:
    """Build the tree of `budget` nodes from a block's logits [B-1, V].

    token_ids [V]: the token of each column (a reduced vocabulary); None: the column itself. Fewer nodes come out only
    where depth and ranks allow no more.
    """
    ranks = min(MAX_RANKS, budget, logits.shape[-1])
    top = torch.log_softmax(logits.float(), dim=-1).topk(ranks, dim=-1)
    tokens = top.indices if token_ids is None else token_ids[top.indices]
    return grow_tree(top.values.tolist(), tokens.tolist(), budget)


def grow_tree(logp: list[list[float]], tokens: list[list[int]], budget: int) -> Tree:
    """Grow a tree from each depth's log-probabilities and tokens, both [depths][ranks], most probable first."""
    tree = Tree([], [], [])
    heap: list[tuple[float, int, int, int]] = [(-logp[0][0], 0, 0, ROOT)]  # score, depth - 1, rank, parent
    while heap and len(tree) < budget:
        negative, level, rank, parent = heapq.heappop(heap)
        node = len(tree)
        tree.tokens.append(tokens[level][rank])
        tree.depths.append(level + 1)
        tree.parents.append(parent)
        if rank + 1 < len(logp[level]):
            heapq.heappush(heap, (negative + logp[level][rank] - logp[level][rank + 1], level, rank + 1, parent))
        if level + 1 < len(logp):
            heapq.heappush(heap, (negative - logp[level + 1][0], level + 1, 0, node))
    return tree
