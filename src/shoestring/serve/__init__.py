from shoestring.serve.engine import Completion, Drafter, Engine, Output, Request
from shoestring.serve.kv_cache import KVCache
from shoestring.serve.sampling import Sampling, sample

__all__ = ["Completion", "Drafter", "Engine", "KVCache", "Output", "Request", "Sampling", "sample"]
