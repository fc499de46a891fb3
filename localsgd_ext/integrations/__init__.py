"""Callbacks for training loops of other packages, each imported only when asked for: `transformers` and `lightning`, and `torchft`, over a manager of torchft."""
