"""The target side: documents in, packs of hidden states out. One process per GPU; `producer/loop.py` is its flow."""
