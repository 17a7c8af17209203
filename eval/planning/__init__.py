"""``kvblend plan``: bytes, gain and break-even from a model's config alone."""
