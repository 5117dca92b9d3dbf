"""Structured output: constraints compiled for a vocabulary, and matchers that say what may come next."""
