"""Tools for testing KV fusion: tiny random-weight models of every decoder family."""
