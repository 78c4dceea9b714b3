"""The two graphs, one component per file."""
