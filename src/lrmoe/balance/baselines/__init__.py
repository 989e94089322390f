"""The systems that LRMoE is compared with, one module each, on the same engine."""
