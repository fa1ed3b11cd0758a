"""The drafter's process: takes packs from the ring, trains the DFlash drafter, keeps journal and checkpoints."""
