"""``kvblend compare``: what changed between two runs, or between two systems."""
