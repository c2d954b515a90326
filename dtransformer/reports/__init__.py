"""Reports of what is so, printed: sharding, communication, memory, throughput."""
