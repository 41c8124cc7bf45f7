"""Training under a plan: process groups, exchanges of tokens and experts, and the model they serve."""
