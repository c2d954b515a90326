"""What is so, printed: sharding, communication, memory, throughput."""
