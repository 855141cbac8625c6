"""The operator page: what it shows, as pure functions, and the page itself."""
