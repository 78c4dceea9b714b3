"""A forward as a flat list of steps over memory addresses."""
