"""``kvblend index | ask | chat``: the pipeline on the command line."""
