"""From files to documents: tokens, loss masks, packs. Knows nothing of the ring or of hidden states."""
