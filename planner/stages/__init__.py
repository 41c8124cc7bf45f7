"""Pipeline stages: which sites hold which layers, in what order, and how long a step takes then."""
