"""Running a real vLLM engine in this process on a CPU: for tests, benchmarks and references."""
