"""Everything that knows vLLM: hooks, decode-side counters, admin routes, the patch tool."""
