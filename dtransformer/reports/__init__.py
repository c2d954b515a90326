"""Reports on sharding, communication, memory, expert load and throughput."""
