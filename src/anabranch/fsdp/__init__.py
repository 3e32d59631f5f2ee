"""Models that FSDP2 shards: exchanges between nodes, units from blocks, watching, and their planning."""
