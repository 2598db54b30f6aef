from shoestring.model.spec import ModelSpec, RopeScaling
from shoestring.model.transformer import Decoder, Head

__all__ = ["Decoder", "Head", "ModelSpec", "RopeScaling"]
