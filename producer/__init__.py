"""The target side: documents in, packs of hidden states out. One process per target GPU; `producer/loop.py` is its flow."""
