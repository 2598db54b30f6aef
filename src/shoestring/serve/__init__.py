from shoestring.serve.engine.engine import Completion, Engine, Output, Request
from shoestring.serve.engine.request import Draft
from shoestring.serve.engine.sampling import Sampling, sample
from shoestring.serve.engine.scheduler import QueueFull
from shoestring.serve.engine.skip_policy import Fixed, SkipPolicy
from shoestring.serve.speculative.draft_model import DraftModel
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import DrafterStack, open_drafter
from shoestring.serve.speculative.layer_skip_drafter import LayerSkipDrafter
from shoestring.serve.speculative.ngram_drafter import NgramDrafter

__all__ = [
    "Completion",
    "Draft",
    "DraftModel",
    "Drafter",
    "DrafterStack",
    "Engine",
    "Fixed",
    "LayerSkipDrafter",
    "NgramDrafter",
    "Output",
    "QueueFull",
    "Request",
    "Sampling",
    "SkipPolicy",
    "open_drafter",
    "sample",
]
