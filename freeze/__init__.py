"""What a change of structure must not change; see README.md beside this file."""
