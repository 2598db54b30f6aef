"""Mixture of experts at decode: choosing experts, their products, and the sum of what they computed."""
