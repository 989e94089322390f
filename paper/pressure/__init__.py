"""What completes when the batch grows and the memory of a rank does not, beside the published figures."""
