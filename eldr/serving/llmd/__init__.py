"""ELDR as an llm-d coordinator: two calls per request through an Inference Gateway."""
