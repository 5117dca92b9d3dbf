"""One lean decoder for engine and trainer, and the tokenizer; nothing is imported here."""
