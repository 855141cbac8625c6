"""What is replayed: the bundled demo model and prompts, expert traces, arrival processes."""
