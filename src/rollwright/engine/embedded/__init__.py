"""The engine inside the process: continuous batching over a radix KV cache, in torch; nothing is imported
here."""
