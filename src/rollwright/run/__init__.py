"""The conductor: the only package that imports all others; nothing but the command line imports it."""
