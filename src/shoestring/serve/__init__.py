from shoestring.serve.drafters import Drafter, DraftModel, Ngram, open_drafter
from shoestring.serve.engine import Completion, Engine, Output, Request
from shoestring.serve.request import Draft
from shoestring.serve.sampling import Sampling, sample
from shoestring.serve.scheduler import QueueFull
from shoestring.serve.self_skip import SelfSkip
from shoestring.serve.skipping import AdaSkip, ByContext, Fixed, SkipPolicy, open_policy
from shoestring.serve.stack import Stacked

__all__ = [
    "AdaSkip",
    "ByContext",
    "Completion",
    "Draft",
    "DraftModel",
    "Drafter",
    "Engine",
    "Fixed",
    "Ngram",
    "Output",
    "QueueFull",
    "Request",
    "Sampling",
    "SelfSkip",
    "SkipPolicy",
    "Stacked",
    "open_drafter",
    "open_policy",
    "sample",
]
