"""The demo: real prefill and decode workers, the router in front, one replay per policy, one table.

Everything a user would run by hand is run here as the same commands in real processes.
"""
