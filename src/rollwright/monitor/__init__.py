"""Live figures and what a person sees on the terminal."""
