"""Workers that speak the engine's HTTP and misbehave on demand."""
