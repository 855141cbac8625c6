"""Prefill first, decode chosen afterwards, over pools without URLs: shared by Ray and llm-d."""
