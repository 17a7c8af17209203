"""The only room of blend that knows transformers: model view, fusion cache, narrowing hooks, attention, loading."""
