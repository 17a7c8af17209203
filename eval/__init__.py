"""eval: the command line, the demo, benches, and measures of fidelity to full prefill."""
