"""Configuration of a run: the schema, how it is loaded, and the fields of a pack. No torch, no processes."""
