"""The drafter's process: takes packs from the ring, trains the DFlash drafter on them, keeps journal and checkpoints."""
