from shoestring.serve.drafters import Drafter, DraftModel, Ngram, Stacked, open_drafter
from shoestring.serve.engine import Completion, Engine, Output, Request
from shoestring.serve.request import Draft
from shoestring.serve.sampling import Sampling, sample
from shoestring.serve.scheduler import QueueFull

__all__ = [
    "Completion",
    "Draft",
    "DraftModel",
    "Drafter",
    "Engine",
    "Ngram",
    "Output",
    "QueueFull",
    "Request",
    "Sampling",
    "Stacked",
    "open_drafter",
    "sample",
]
