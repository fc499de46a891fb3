"""Local SGD in what other packages make, each imported only when asked for: callbacks for the Trainers of `transformers` and
`lightning`; `torchft` over its manager."""
