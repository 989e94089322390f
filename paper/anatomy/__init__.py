"""Where the error of a drop comes from, by layer, step and batch."""
