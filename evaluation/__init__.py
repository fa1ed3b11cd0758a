"""Measuring a drafter where it counts: in the decoding loop, against the target's own greedy text."""
