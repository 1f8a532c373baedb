"""A book in the terminal: lists, one line per news, and what is wrong with a run."""
