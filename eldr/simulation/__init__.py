"""What a fleet would do: a discrete-event simulator that replays recorded expert routing."""
