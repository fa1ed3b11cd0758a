"""Starting, watching, commanding and showing a run. Never imports torch, the producer or the consumer."""
