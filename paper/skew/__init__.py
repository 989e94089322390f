"""What fixed ownership, UltraEP and LRMoE can do with skewed loads under the same capacity."""
