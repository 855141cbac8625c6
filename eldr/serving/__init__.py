"""The router process: an OpenAI-compatible server in front of prefill and decode workers."""
