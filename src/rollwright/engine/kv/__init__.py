"""What keys and values cost: from a model's config.json to bytes, concurrency and a plan; no torch."""
