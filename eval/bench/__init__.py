"""What single parts cost, measured: one file per bench, each the work behind a ``kvblend bench`` command."""
